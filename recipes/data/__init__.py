"""Documents of any length to batches of packed sequences.

sources (files, prepared shards, Hugging Face datasets) -> tokens -> packing -> samples -> loader.
"""
