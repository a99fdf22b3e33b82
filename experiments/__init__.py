"""How do I run it, and how do I reproduce the papers? One script a job or table."""
