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
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig

from striped_cp import Documents, RingAttention

NAME = "striped_ring"

# Options of transformers' attention functions that change the result; None and False do not.
_OTHER_ATTENTION = ("softcap", "position_bias", "output_attentions")


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
    attention_mask: Tensor | int | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    ring: ForwardPass | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    s_aux: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """(B, S/P, H, D), from (B, H, S/P, D) and twice (B, Hkv, S/P, D): this rank's tokens.

    The window is what `_mask` returned for this layer; s_aux are sinks.
    """
    if ring is None:
        raise ValueError(
            f"{type(module).__name__} ran without `ring`: call the model with the whole batch of "
            "shard_batch; a model that keeps keyword arguments from its attention cannot work"
        )
    window = attention_mask if isinstance(attention_mask, int) else None
    if sliding_window not in (None, window):
        raise ValueError(
            f"{type(module).__name__}: sliding_window = {sliding_window}, but the window of its "
            f"mask is {window}"
        )
    if s_aux is None and getattr(module, "sinks", None) is not None:
        raise ValueError(f"{type(module).__name__} has sinks and hands none to its attention")
    refused = {name: options.get(name) for name in _OTHER_ATTENTION}
    if window is None:
        refused["attention_mask"] = attention_mask
    refused |= {"dropout": dropout or None}
    refused |= {"is_causal": None if is_causal in (None, True) else "False"}
    for name, setting in refused.items():
        if setting is not None and setting is not False:
            shown = "a tensor" if isinstance(setting, Tensor) else setting
            raise ValueError(
                f"{type(module).__name__}: {name} = {shown} is not supported: the ring is causal "
                "attention within documents, without masks, softcap or dropout"
            )
    device = query.device.type
    if torch.is_autocast_enabled(device):  # RoPE leaves it: as in torch's own attention
        dtype = torch.get_autocast_dtype(device)
        query, key, value = (x.to(dtype) for x in (query, key, value))
    # A plain attribute, so that a compiled layer can set it too.
    module.ring_pass = ring  # type: ignore[assignment]
    out = ring.attend(
        query,
        key,
        value,
        documents=ring.documents,
        scale=scaling,
        enable_gqa=True,
        window=window,
        sinks=s_aux,
    )
    return out.transpose(1, 2), None


def _mask(
    *_args: Any,
    config: PreTrainedConfig | None = None,
    use_vmap: bool = False,
    local_size: int | None = None,
    **_: Any,
) -> int | None:
    """No mask of S^2 entries: causality and documents are the ring's. A window is its length.

    Models hand it to the attention of the layers that it is for, whatever else they tell them.
    """
    if use_vmap:
        raise ValueError("the model adds to the causal mask, which the ring does not have")
    if local_size is not None and local_size != getattr(config, "sliding_window", None):
        raise ValueError(f"a mask of {local_size} tokens, not the model's sliding window")
    return local_size


AttentionInterface.register(NAME, _attention)
AttentionMaskInterface.register(NAME, _mask)
