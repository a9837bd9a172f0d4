"""Checkpoints: which one a run loads, is it whole, when to save, what a resume keeps."""
