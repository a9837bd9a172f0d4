"""Ranks that trade sequence for heads before and after attention (DeepSpeed Ulysses, 2309.14509).

Of the P = R x U ranks, the U that share a ring index r hold the U parts, in order, of what rank r
of a ring of R holds. One all-to-all gives each of them all these tokens and 1/U of the heads; then
every rank runs a ring of R, with U times longer tiles to hide its hops behind; one all-to-all
brings the result back.

    P = 4 = 2 x 2, S = 8, two heads a b      tokens, heads
    rank (0, 0)   0 2   a b                  0 2 4 6   a
    rank (0, 1)   4 6   a b       <->        0 2 4 6   b
    rank (1, 0)   1 3   a b                  1 3 5 7   a
    rank (1, 1)   5 7   a b                  1 3 5 7   b

The tensors of a pass travel in one message. What the backward pass needs of q, k, v and out in this
form travels again rather than being kept: docs/reference/parallelism.md has the arithmetic.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from .algorithm import attention_backward, attention_forward
from .kernels.base import BackwardInputs, Inputs, TileAttention
from .merge import accumulation_dtype, sink_gradients
from .ring import Ring
from .tiles import Tile


def forward(
    x: Inputs,
    axis: Ring,
    tiles: Sequence[Tile],
    kernel: TileAttention,
    ring: Ring,
    scale: float,
    rotate_method: str,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`attention_forward` of a ring of R whose ranks share their heads over `axis`.

    Args:
        x: query (B, H, n, D), n = S/P; key and value (B, Hkv, n, D).
        axis: the U ranks; only its all_to_all is used.
        tiles: of the ring of R.
        sinks: (H,), of all heads.

    Returns:
        out (B, H, n, D), and lse of the rank's part of the heads, (B, H/U, U n).
    """
    query, key, value = _to_heads(axis, _with_shared_heads(axis, x))
    out, lse = attention_forward(
        Inputs(query, key, value),
        tiles,
        kernel,
        ring,
        scale,
        rotate_method,
        None if sinks is None else _own_heads(axis, sinks),
    )
    (out,) = _to_sequence(axis, (out,))
    return out, lse


def backward(
    x: BackwardInputs,
    axis: Ring,
    tiles: Sequence[Tile],
    kernel: TileAttention,
    ring: Ring,
    scale: float,
    rotate_method: str,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients of `forward` with respect to query, key, value and sinks.

    That of the sinks, (H,), is the rank's share: it counts its rows, and 1/U of the heads.
    """
    kv_heads = x.key.shape[1]
    query, key, value, out, grad_out = _to_heads(
        axis, (*_with_shared_heads(axis, Inputs(*x[:3])), x.out, x.grad_out)
    )
    held = BackwardInputs(query, key, value, out, x.lse, grad_out)
    grads = attention_backward(held, tiles, kernel, ring, scale, rotate_method)
    dq, dk, dv = _to_sequence(axis, grads)
    dsinks = None
    if sinks is not None:
        dsinks = torch.zeros_like(sinks)
        own = sink_gradients(_own_heads(axis, sinks), out, x.lse, grad_out)
        _own_heads(axis, dsinks).copy_(own)
    return dq, _sum_copies(dk, kv_heads), _sum_copies(dv, kv_heads), dsinks


def _own_heads(axis: Ring, sinks: Tensor) -> Tensor:
    """(H/U,) of (H,): those of the heads that this rank has after the exchange."""
    return sinks.chunk(axis.world_size)[axis.rank]


def _with_shared_heads(axis: Ring, x: Inputs) -> Inputs:
    """Key heads repeated as often as it takes to give every rank a whole number of them."""
    kv_heads = x.key.shape[1]
    copies = math.lcm(kv_heads, axis.world_size) // kv_heads
    if copies == 1:
        return x
    key, value = (t.repeat_interleave(copies, dim=1) for t in (x.key, x.value))
    return Inputs(x.query, key, value)


def _sum_copies(grad: Tensor, kv_heads: int) -> Tensor:
    """The gradient of key heads from that of their copies."""
    if grad.shape[1] == kv_heads:
        return grad
    by_head = grad.unflatten(1, (kv_heads, -1))
    return by_head.sum(dim=2, dtype=accumulation_dtype(grad.dtype)).to(grad.dtype)


def _to_heads(axis: Ring, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """(B, h, n, D) each to (B, h/U, U n, D), in memory order (B, U n, h/U, D)."""
    size = axis.world_size
    if size == 1:
        return tuple(tensors)
    # By destination: a part of the heads of every row.
    parts = [x.unflatten(1, (size, -1)).permute(1, 0, 3, 2, 4) for x in tensors]
    received = (x.transpose(0, 1) for x in _exchange(axis, parts))
    return tuple(_own(x).flatten(1, 2).transpose(1, 2) for x in received)


def _to_sequence(axis: Ring, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Inverse of `_to_heads`."""
    size = axis.world_size
    if size == 1:
        return tuple(tensors)
    # By destination: a part of the rows of every head.
    parts = [x.unflatten(2, (size, -1)).permute(2, 0, 3, 1, 4) for x in tensors]
    received = (x.permute(1, 2, 0, 3, 4) for x in _exchange(axis, parts))
    return tuple(_own(x).flatten(2, 3).transpose(1, 2) for x in received)


def _own(x: Tensor) -> Tensor:
    """In memory of its own, not a view of the message."""
    return x.clone(memory_format=torch.contiguous_format)


def _exchange(axis: Ring, parts: Sequence[Tensor]) -> list[Tensor]:
    """One all-to-all of several tensors (U, ...), all of one dtype: part i goes to rank i."""
    sent = torch.cat([x.flatten(1) for x in parts], dim=1)
    received = torch.empty_like(sent)
    axis.all_to_all(received, sent).wait()
    sizes = [x[0].numel() for x in parts]
    pieces = received.split(sizes, dim=1)
    return [piece.reshape(x.shape) for piece, x in zip(pieces, parts, strict=True)]
