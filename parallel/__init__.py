"""What runs where, and when does it talk? Meshes, collectives, plans; never a model class."""
