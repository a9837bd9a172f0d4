"""Gradient checkpointing that does not run the ring a second time."""

from __future__ import annotations

from functools import partial

import torch
from torch.utils.checkpoint import create_selective_checkpoint_contexts
from transformers import PreTrainedModel


def checkpoint_keeping_attention(model: PreTrainedModel) -> None:
    """Recompute every layer in the backward pass, except attention, whose output is kept.

    Costs one tensor (B, S/P, H, D) per layer more than `gradient_checkpointing_enable`, and saves
    attention's forward pass, most of the time of a layer at long contexts. The Trainer's own
    `gradient_checkpointing` must stay off: it would replace this.
    """
    kept = [torch.ops.striped_cp.ring_attention.default]
    model.gradient_checkpointing_enable(
        {
            "use_reentrant": False,
            "context_fn": partial(create_selective_checkpoint_contexts, kept),
        }
    )
