"""Hugging Face weights in and out: folders checked, read and written, RoPE settings included."""
