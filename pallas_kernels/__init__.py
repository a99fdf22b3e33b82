"""How does one kernel run fast on one chip? Raw arrays in, raw arrays out."""
