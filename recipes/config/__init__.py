"""The settings of a run: their schema, how they are read, and what is refused."""
