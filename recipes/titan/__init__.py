"""torchtitan 0.2.2 made to do what it does not: every patch of it, in one room."""
