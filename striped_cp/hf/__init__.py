"""Hugging Face models on the ring: causal models of transformers, unchanged.

    model = enable(model, mesh)                                     # once
    loss = model(**shard_batch(input_ids, labels, mesh)).loss      # per batch, this rank's share

The only part of `striped_cp` that imports transformers (`pip install striped-cp[hf]`).
"""

from .batch import RingBatch, RingCollator, shard_batch
from .checkpointing import checkpoint_keeping_attention
from .enable import disable, enable
from .loss import chunked_loss
from .trainer import RingTrainerMixin

__all__ = [
    "RingBatch",
    "RingCollator",
    "RingTrainerMixin",
    "checkpoint_keeping_attention",
    "chunked_loss",
    "disable",
    "enable",
    "shard_batch",
]
