"""The decoder that all families share: torchtitan's LLaMA-3, and what the others need beside it."""
