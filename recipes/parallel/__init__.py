"""The ring of a run: its layout, its group, and whether its links deliver."""
