"""The life of a process: its log, how it is asked to leave, how it ends when something fails."""
