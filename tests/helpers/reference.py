"""The one reference attention and the one tolerance check that all tests use."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from striped_cp import Documents


def visible_pairs(
    seq_len: int, documents: Documents | None, batch: int, window: int | None = None
) -> Tensor:
    """Dense visibility mask (B, S, S): causal, within documents and window."""
    position = torch.arange(seq_len)
    distance = position[:, None] - position
    seen = (distance >= 0) & (distance < (seq_len if window is None else window))
    causal = seen.expand(batch, -1, -1)
    if documents is None:
        return causal
    doc = torch.searchsorted(
        documents.boundaries, position.expand(batch, -1).contiguous(), right=True
    )
    return causal & (doc[:, :, None] == doc[:, None, :])


def reference_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    documents: Documents | None = None,
    scale: float | None = None,
    window: int | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Dense masked attention of whole sequences in float64: (B, H, S, D)."""
    query, key, value = (x.double() for x in (query, key, value))
    groups = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    mask = visible_pairs(query.shape[2], documents, query.shape[0], window).to(query.device)
    scores = (query @ key.transpose(-1, -2) * scale).masked_fill(~mask[:, None], float("-inf"))
    if sinks is not None:
        column = sinks.double()[:, None, None].expand(*scores.shape[:3], 1)
        return torch.cat([scores, column], dim=-1).softmax(-1)[..., :-1] @ value
    return scores.softmax(-1) @ value


def reference_gradients(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    grad_out: Tensor,
    documents: Documents | None = None,
    scale: float | None = None,
    window: int | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """(out, dq, dk, dv) of `reference_attention`, with sinks also their gradient; float64."""
    tensors = (query, key, value) if sinks is None else (query, key, value, sinks)
    leaves = [x.detach().double().requires_grad_() for x in tensors]
    out = reference_attention(*leaves[:3], documents, scale, window, *leaves[3:])
    return out.detach(), *torch.autograd.grad(out, leaves, grad_out.double())


NAMES = ("out", "dq", "dk", "dv", "dsinks")  # what is compared, in this order
# Relative to the largest value, by the dtype that was computed in.
TOLERANCE = {
    torch.float64: 1e-12,
    torch.float32: 1e-5,
    torch.bfloat16: 2e-2,
    torch.float16: 3e-3,
}


def relative_error(got: Tensor, want: Tensor) -> float:
    """Largest difference over the largest value of `want`, or over 0.1: gradients may be zero."""
    assert got.shape == want.shape, f"{tuple(got.shape)} is not {tuple(want.shape)}"
    assert got.isfinite().all(), "not finite"
    return float((got.double() - want.double()).abs().max() / want.double().abs().max().clamp(0.1))


def check_close(name: str, got: Tensor, want: Tensor, dtype: torch.dtype | None = None) -> None:
    """Fail unless `got` equals `want` to what its dtype can hold."""
    error, allowed = relative_error(got, want), TOLERANCE[dtype or got.dtype]
    assert error <= allowed, f"{name}: relative error {error:.2e}, allowed {allowed:.0e}"


def check_all_close(got: Sequence[Tensor], want: Sequence[Tensor], where: str = "") -> None:
    """`check_close` of out, dq, dk, dv and, where there are sinks, their gradient."""
    assert len(got) == len(want)
    for name, x, y in zip(NAMES, got, want, strict=False):
        check_close(f"{where} {name}", x.detach(), y)
