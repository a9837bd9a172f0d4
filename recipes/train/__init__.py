"""torchtitan's trainer and validator for batches that are spread over the ring."""
