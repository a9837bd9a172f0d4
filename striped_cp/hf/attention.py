"""The ring as one of transformers' attention functions, by its public `AttentionInterface`.

The function is registered once, and knows of no model: which ring to run on comes with every
forward pass, as the keyword argument `ring` that transformers hands on to every attention. So it is
there again when a checkpointed layer is recomputed, and models and meshes do not meet.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from striped_cp import Documents, RingAttention

NAME = "striped_ring"

# Options of transformers' attention functions that change the result; None and False do not.
_OTHER_ATTENTION = ("sliding_window", "s_aux", "softcap", "position_bias", "output_attentions")


@dataclass(eq=False)
class ForwardPass:
    """One forward pass of an enabled model: where its attention runs."""

    attend: RingAttention
    documents: Documents | None


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    ring: ForwardPass | None = None,
    is_causal: bool | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """(B, S/P, H, D), from (B, H, S/P, D) and twice (B, Hkv, S/P, D): this rank's tokens."""
    if ring is None:
        raise ValueError(
            f"{type(module).__name__} ran without `ring`: call the model with the whole batch of "
            "shard_batch; a model that keeps keyword arguments from its attention cannot work"
        )
    refused = {name: options.get(name) for name in _OTHER_ATTENTION}
    refused |= {"attention_mask": attention_mask, "dropout": dropout or None}
    refused |= {"is_causal": None if is_causal in (None, True) else "False"}
    for name, setting in refused.items():
        if setting is not None and setting is not False:
            shown = "a tensor" if isinstance(setting, Tensor) else setting
            raise ValueError(
                f"{type(module).__name__}: {name} = {shown} is not supported: the ring is causal "
                "attention within documents, without masks, windows, sinks, softcap or dropout"
            )
    device = query.device.type
    if torch.is_autocast_enabled(device):  # RoPE leaves it: as in torch's own attention
        dtype = torch.get_autocast_dtype(device)
        query, key, value = (x.to(dtype) for x in (query, key, value))
    # A plain attribute, so that a compiled layer can set it too.
    module.ring_pass = ring  # type: ignore[assignment]
    out = ring.attend(query, key, value, documents=ring.documents, scale=scaling, enable_gqa=True)
    return out.transpose(1, 2), None


def _mask(*_args: Any, use_vmap: bool = False, local_size: int | None = None, **_: Any) -> None:
    """No mask of S^2 entries: causality and documents are the ring's."""
    if local_size is not None:
        raise ValueError(f"a window of {local_size} tokens is not supported: the ring has none")
    if use_vmap:
        raise ValueError("the model adds to the causal mask, which the ring does not have")


AttentionInterface.register(NAME, _attention)
AttentionMaskInterface.register(NAME, _mask)
