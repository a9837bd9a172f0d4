"""Striped context parallelism: exact ring attention in which every rank does the same work."""
