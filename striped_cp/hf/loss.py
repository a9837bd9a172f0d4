"""The loss of a long sequence without all of its logits at once."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from .batch import IGNORE


def chunked_loss(model: PreTrainedModel, batch: dict[str, Any], chunk_tokens: int = 2048) -> Tensor:
    """`model(**batch).loss`, with the logits of `chunk_tokens` tokens in memory at a time.

    The logits of 131,072 tokens and 151,936 words take 74 GiB in float32, and as much again for
    their gradient. Here every chunk is a checkpoint of its own, forward and backward.

    Args:
        model: enabled, with a linear output projection and cross-entropy for its loss.
        batch: of `shard_batch`, with labels.

    Returns:
        (), this rank's share, with gradient.

    Raises:
        ValueError: the batch has no labels; or the model does something to its logits after the
            projection, such as scaling or softcap.
    """
    if "shift_labels" not in batch:
        raise ValueError("the batch has no labels: give them to shard_batch")
    targets = batch["shift_labels"].flatten()
    inputs = {
        name: value
        for name, value in batch.items()
        if name not in ("labels", "shift_labels", "num_items_in_batch")
    }
    kept: list[Tensor] = []
    hook = model.base_model.register_forward_hook(lambda *call: kept.append(call[-1][0]))
    try:
        # Through the whole model, as whatever wraps it expects; one token's logits are looked at.
        own = model(**inputs, logits_to_keep=1).logits
    finally:
        hook.remove()
    (hidden,) = kept
    head = model.get_output_embeddings()
    with torch.no_grad():
        plain = head(hidden[:, -1:])
    if not torch.equal(own, plain):
        raise ValueError(
            f"{type(model).__name__} changes its logits after the output projection: chunked_loss "
            "does not know how; use model(**batch).loss"
        )
    total = hidden.new_zeros((), dtype=torch.float32)
    for some, of_them in zip(
        hidden.flatten(0, 1).split(chunk_tokens), targets.split(chunk_tokens), strict=True
    ):
        total = total + checkpoint(_sum_of_losses, head, some, of_them, use_reentrant=False)
    return total / batch["num_items_in_batch"]


def _sum_of_losses(head: nn.Module, hidden: Tensor, targets: Tensor) -> Tensor:
    logits = head(hidden).float()
    return cross_entropy(logits, targets, ignore_index=IGNORE, reduction="sum")
