"""What the `[memory]` section and activation checkpointing trade for memory."""
