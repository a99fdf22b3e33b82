"""What runs where, and when does it talk? Meshes, collectives, plans; never a model class.

What thinks about it, without being needed by it, is the package `planner`.
"""
