"""The CUDA attention operators as their C++ computes, on the CPU.

What makes a wrong call visible: outputs begin as NaN and only the rows that a kernel's grid reaches
are written, causal and windows are aligned to the bottom right of each segment, rows that see no
key get out 0 and LSE +inf (FlashAttention-2; -inf in 3), a variable-length LSE is (H, rows), and
nothing but segments is ever read or written (torch 2.13,
aten/src/ATen/native/transformers/cuda/flash_attn).
"""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

_GRID = 128  # rows of a block of the kernel's grid
_SEGMENTS = 65_535  # the grid's second dimension


def stand_ins(version: int = 2) -> SimpleNamespace:
    """In the place of `torch.ops.aten`; from 3 on, gradients of idle rows stay unwritten."""
    return SimpleNamespace(
        _flash_attention_forward=lambda *a, **k: _forward(version, *a, **k),
        _flash_attention_backward=lambda *a, **k: _backward(version, *a, **k),
        _scaled_dot_product_cudnn_attention=_cudnn_forward,
        _scaled_dot_product_cudnn_attention_backward=_cudnn_backward,
    )


def _nan(x: Tensor) -> Tensor:
    return torch.full_like(x, float("nan"), memory_format=torch.contiguous_format)


def _scores(
    q: Tensor, k: Tensor, causal: bool, scale: float, window: tuple[int, int] = (-1, -1)
) -> Tensor:
    """(H, n, m) of q (n, H, D) and k (m, Hkv, D).

    window: keys seen to the left and right of the diagonal that ends at the bottom right; -1: all.
    """
    groups = q.shape[1] // k.shape[1]
    scores = scale * q.transpose(0, 1) @ k.repeat_interleave(groups, 1).permute(1, 2, 0)
    n, m = scores.shape[-2:]
    left, right = window
    if causal:
        right = 0
    hidden = torch.zeros(n, m).bool()
    if right >= 0:
        hidden |= torch.ones(n, m).triu(m - n + right + 1).bool()
    if left >= 0:
        hidden |= torch.ones(n, m).tril(m - n - left - 1).bool()
    return scores.masked_fill(hidden, float("-inf"))


def _attend(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, window: tuple[int, int] = (-1, -1)
) -> tuple[Tensor, Tensor]:
    """out (n, H, D), lse (H, n) with -inf where a row sees nothing."""
    groups = q.shape[1] // k.shape[1]
    scores = _scores(q, k, causal, scale, window)
    if k.shape[0] == 0:
        return torch.zeros_like(q), q.new_full((q.shape[1], q.shape[0]), float("-inf"))
    lse = scores.logsumexp(-1)
    weights = (scores - lse[..., None]).exp().nan_to_num(0.0)
    return (weights @ v.repeat_interleave(groups, 1).transpose(0, 1)).transpose(0, 1), lse


def _attend_backward(
    g: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    causal: bool,
    scale: float,
    window: tuple[int, int] = (-1, -1),
) -> tuple[Tensor, Tensor, Tensor]:
    if 0 in (q.shape[0], k.shape[0]):
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    groups, kv_heads = q.shape[1] // k.shape[1], k.shape[1]
    kk, vv = (x.repeat_interleave(groups, 1).transpose(0, 1) for x in (k, v))
    weights = (_scores(q, k, causal, scale, window) - lse[..., None]).exp()
    gg, qq = g.transpose(0, 1), q.transpose(0, 1)
    delta = (gg * o.transpose(0, 1)).sum(-1, keepdim=True)
    ds = weights * (gg @ vv.transpose(1, 2) - delta) * scale

    def of_kv_head(x: Tensor) -> Tensor:
        return x.unflatten(0, (kv_heads, groups)).sum(1).transpose(0, 1)

    return (
        (ds @ kk).transpose(0, 1),
        of_kv_head(ds.transpose(1, 2) @ qq),
        of_kv_head(weights.transpose(1, 2) @ gg),
    )


def _segments(cu_q: Tensor, cu_k: Tensor, q: Tensor, k: Tensor) -> list[tuple[slice, slice]]:
    for cu, rows in ((cu_q, q.shape[0]), (cu_k, k.shape[0])):
        assert cu.dtype == torch.int32
        assert cu.is_contiguous()
        assert 0 <= cu[0] <= cu[-1] <= rows
        assert (cu.diff() >= 0).all()
    assert len(cu_q) == len(cu_k) <= _SEGMENTS + 1
    borders = (pairwise(cu.tolist()) for cu in (cu_q, cu_k))
    return [(slice(*a), slice(*b)) for a, b in zip(*borders, strict=True)]


def _reached(rows: slice, longest: int) -> slice:
    return slice(rows.start, min(rows.stop, rows.start + -(-longest // _GRID) * _GRID))


def _checked(causal: bool, window: tuple[int | None, int | None]) -> tuple[int, int]:
    """The window arguments, as the operator takes them and no other way."""
    left, right = window
    if left is None and right is None:
        return -1, -1
    # A window to the left of causal attention; the kernel reads -1 as no limit.
    assert causal
    assert type(left) is int
    assert left >= 0
    assert right == 0
    return left, right


def _forward(
    version: int,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_q: Tensor | None,
    cu_k: Tensor | None,
    longest_q: int,
    longest_k: int,
    dropout: float,
    causal: bool,
    debug: bool,
    *,
    scale: float,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
) -> tuple[Any, ...]:
    assert not dropout
    window = _checked(causal, (window_size_left, window_size_right))
    assert not debug
    assert all(x.stride(-1) == 1 for x in (q, k, v))
    out = _nan(q)
    nothing = float("inf") if version == 2 else float("-inf")
    if cu_q is None or cu_k is None:
        lse = q.new_full((q.shape[0], q.shape[2], q.shape[1]), float("nan"))
        for b in range(len(q)):
            out[b], lse[b] = _attend(q[b], k[b], v[b], causal, scale, window)
        return out, lse.masked_fill(lse == float("-inf"), nothing), None, None, None
    assert longest_q > 1  # else the kernel regroups queries, and counts empty segments
    lse = q.new_full((q.shape[1], q.shape[0]), float("nan"))
    for rows, keys in _segments(cu_q, cu_k, q, k):
        assert rows.stop - rows.start <= longest_q
        assert keys.stop - keys.start <= longest_k
        part, its_lse = _attend(q[rows], k[keys], v[keys], causal, scale, window)
        reached = _reached(rows, longest_q)
        count = reached.stop - reached.start
        out[reached], lse[:, reached] = part[:count], its_lse[:, :count]
    return out, lse.masked_fill(lse == float("-inf"), nothing), None, None, None


def _backward(
    version: int,
    g: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    cu_q: Tensor | None,
    cu_k: Tensor | None,
    longest_q: int,
    longest_k: int,
    dropout: float,
    causal: bool,
    seed: Tensor,
    unused: Tensor,
    *,
    scale: float,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    assert not dropout
    window = _checked(causal, (window_size_left, window_size_right))
    assert lse.is_contiguous()
    assert all(x.stride(-1) == 1 for x in (q, k, v))
    grads = _nan(q), _nan(k), _nan(v)
    if cu_q is None or cu_k is None:
        assert lse.shape == (q.shape[0], q.shape[2], q.shape[1])
        for b in range(len(q)):
            parts = _attend_backward(g[b], q[b], k[b], v[b], o[b], lse[b], causal, scale, window)
            for whole, part in zip(grads, parts, strict=True):
                whole[b] = part
        return grads
    assert lse.shape == (q.shape[1], q.shape[0])
    for rows, keys in _segments(cu_q, cu_k, q, k):
        idle = rows.start == rows.stop or keys.start == keys.stop
        if idle and version > 2:
            continue
        parts = _attend_backward(
            *(g[rows], q[rows], k[keys], v[keys], o[rows], lse[:, rows], causal, scale, window)
        )
        for whole, part, of, longest in zip(
            grads, parts, (rows, keys, keys), (longest_q, longest_k, longest_k), strict=True
        ):
            reached = _reached(of, longest)
            whole[reached] = part[: reached.stop - reached.start]
    return grads


def _cudnn_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: None,
    with_lse: bool,
    dropout: float,
    causal: bool,
    debug: bool,
    *,
    scale: float,
) -> tuple[Any, ...]:
    assert with_lse
    assert not dropout
    assert k.shape[2] > 1
    out, lse = torch.empty_like(q), q.new_empty(*q.shape[:3])
    for b in range(len(q)):
        part, lse[b] = _attend(*(x[b].transpose(0, 1) for x in (q, k, v)), causal, scale)
        out[b] = part.transpose(0, 1)
    return out, lse.unsqueeze(-1)


def _cudnn_backward(
    g: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    *state: Any,
    scale: float,
) -> list[Tensor]:
    causal = state[-1]
    assert lse.shape == (*q.shape[:3], 1)
    assert lse.is_contiguous()
    by_row = [
        _attend_backward(
            *(x[b].transpose(0, 1) for x in (g, q, k, v, o)), lse[b, ..., 0], causal, scale
        )
        for b in range(len(q))
    ]
    return [torch.stack([x.transpose(0, 1) for x in xs]) for xs in zip(*by_row, strict=True)]
