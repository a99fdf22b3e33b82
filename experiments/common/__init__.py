"""What commands share; nothing here is run by itself."""
