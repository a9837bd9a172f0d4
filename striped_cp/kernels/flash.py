"""FlashAttention as built into torch: version 2. Others that the user has activated
(`torch.nn.attention.activate_flash_attention_impl`) answer the same calls and are untried; they too
must write finite rows for queries that see no key.

Without documents a block is one dense call. With documents a pass of a tile is one variable-length
call over the batch packed to (B * n) rows, whatever the number of documents.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from ..blocks import COUNT, K_LEN, K_START, Q_LEN, Q_START, ROW, Mask, Pass
from ..tiles import Tile
from .base import BackwardInputs, Inputs, Partial, PartialGradients, Region, Request
from .dense import DenseKernel, refuse_16_bit_cuda, rowwise_dense

aten = torch.ops.aten


class FlashKernel(DenseKernel):
    name = "flash"

    def refuse(self, request: Request) -> str | None:
        return refuse_16_bit_cuda(request, max_head_dim=256)

    def attend(self, x: Inputs, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        q, k, v = (tensor.transpose(1, 2) for tensor in x)
        out, lse, *_ = aten._flash_attention_forward(
            q, k, v, None, None, q.shape[1], k.shape[1], 0.0, causal, False, scale=scale
        )
        return out.transpose(1, 2), lse

    def attend_backward(
        self, x: BackwardInputs, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v, o, g = (y.transpose(1, 2) for y in (*x[:4], x.grad_out))
        grads = aten._flash_attention_backward(
            g,
            q,
            k,
            v,
            o,
            x.lse.contiguous(),
            None,
            None,
            q.shape[1],
            k.shape[1],
            0.0,
            causal,
            *_no_dropout_state(q),
            scale=scale,
        )
        dq, dk, dv = (x.transpose(1, 2) for x in grads)
        return dq, dk, dv

    def forward(self, x: Inputs, tile: Tile, scale: float) -> Iterator[Partial]:
        if tile.documents is None:
            yield from super().forward(x, tile, scale)
            return
        for tile_pass in tile.passes:
            yield _forward_pass(x, tile_pass, scale)

    def backward(self, x: BackwardInputs, tile: Tile, scale: float) -> Iterator[PartialGradients]:
        if tile.documents is None:
            yield from super().backward(x, tile, scale)
            return
        for tile_pass in tile.passes:
            yield _backward_pass(x, tile_pass, scale)


# Each pass is a call of its own, for the reason given in `DenseKernel.forward`.


def _forward_pass(x: Inputs, tile_pass: Pass, scale: float) -> Partial:
    batch, heads, rows, _ = x.query.shape
    plan = varlen_plan(tile_pass, batch, rows, x.query.device)
    q, k, v = (_pack(tensor, plan.reverse) for tensor in x)
    out, lse, *_ = aten._flash_attention_forward(
        q, k, v, *plan.arguments, 0.0, plan.causal, False, scale=scale
    )
    del q, k, v
    if plan.reverse:
        out, lse = out.flip(0), lse.flip(1)
    return Partial(
        Region(slice(None), 0, rows),
        _unpack(out, batch),
        lse.view(heads, batch, rows).transpose(0, 1),
    )


def _backward_pass(x: BackwardInputs, tile_pass: Pass, scale: float) -> PartialGradients:
    batch, _, rows, _ = x.query.shape
    plan = varlen_plan(tile_pass, batch, rows, x.query.device)
    q, k, v, o, g = (_pack(tensor, plan.reverse) for tensor in (*x[:4], x.grad_out))
    packed_lse = x.lse.transpose(0, 1).flatten(1)
    if plan.reverse:
        packed_lse = packed_lse.flip(1)
    grads = aten._flash_attention_backward(
        g,
        q,
        k,
        v,
        o,
        packed_lse.contiguous(),
        *plan.arguments,
        0.0,
        plan.causal,
        *_no_dropout_state(q),
        scale=scale,
    )
    del g, q, k, v, o
    dq, dk, dv = (_unpack(y.flip(0) if plan.reverse else y, batch) for y in grads)
    everything = Region(slice(None), 0, rows)
    return PartialGradients(everything, everything, dq, dk, dv)


class VarlenPlan(NamedTuple):
    """Arguments of one variable-length call.

    Attributes:
        arguments: cu_seqlens of queries and of keys, int32 on the device; longest segment of each.
        reverse: rows are passed in reverse order, which turns an anticausal block causal.
    """

    arguments: tuple[Tensor, Tensor, int, int]
    causal: bool
    reverse: bool


# Built on a pass's first use in a batch, then shared by all layers, forward and backward.
_plans: WeakKeyDictionary[Pass, VarlenPlan] = WeakKeyDictionary()


def varlen_plan(tile_pass: Pass, batch: int, rows: int, device: torch.device) -> VarlenPlan:
    """The call that computes every block of the pass over `batch` * `rows` packed rows."""
    plan = _plans.get(tile_pass)
    if plan is None:
        segments = packed_segments(tile_pass, batch, rows)
        cu_seqlens = np.concatenate([np.zeros((1, 2), np.int64), segments.cumsum(0)]).astype(
            np.int32
        )
        reverse = tile_pass.mask is Mask.ANTICAUSAL
        if reverse:
            cu_seqlens = (batch * rows - cu_seqlens)[::-1]
        cu_q, cu_k = (
            torch.from_numpy(np.ascontiguousarray(cu_seqlens[:, i])).to(device, non_blocking=True)
            for i in range(2)
        )
        # An upper bound serves. With 1, torch's kernel regroups the queries of grouped-query
        # attention as (segments, heads, D), which counts empty segments too (torch 2.13).
        longest_q, longest_k = segments.max(0).clip(2).tolist()
        causal = tile_pass.mask is not Mask.FULL
        plan = _plans[tile_pass] = VarlenPlan((cu_q, cu_k, longest_q, longest_k), causal, reverse)
    return plan


def packed_segments(tile_pass: Pass, batch: int, rows: int) -> np.ndarray:
    """(query length, key length) of consecutive segments that tile the packed rows: int64 (N, 2).

    Rows between two blocks become segments of their own, (length, 0) or (0, length): they attend to
    nothing and nothing attends to them.
    """
    blocks = np.repeat(tile_pass.blocks, tile_pass.blocks[:, COUNT], axis=0)
    first = np.cumsum(tile_pass.blocks[:, COUNT]) - tile_pass.blocks[:, COUNT]
    repeat = np.arange(len(blocks)) - np.repeat(first, tile_pass.blocks[:, COUNT])
    offset = blocks[:, ROW] * rows + repeat * tile_pass.stride
    q, k = blocks[:, Q_START] + offset, blocks[:, K_START] + offset
    q_end, k_end = q + blocks[:, Q_LEN], k + blocks[:, K_LEN]
    q_gap = np.append(q, batch * rows) - np.insert(q_end, 0, 0)
    k_gap = np.append(k, batch * rows) - np.insert(k_end, 0, 0)
    segments = np.zeros((3 * len(blocks) + 2, 2), np.int64)
    segments[0::3, 0] = q_gap
    segments[1::3, 1] = k_gap
    segments[2::3] = blocks[:, [Q_LEN, K_LEN]]
    return segments[segments.any(axis=1)]


def _pack(x: Tensor, reverse: bool) -> Tensor:
    """(B, H, n, D) -> (B * n, H, D)."""
    x = rowwise_dense(x).transpose(1, 2).flatten(0, 1)
    return x.flip(0) if reverse else x


def _unpack(x: Tensor, batch: int) -> Tensor:
    return x.unflatten(0, (batch, -1)).transpose(1, 2)


def _no_dropout_state(q: Tensor) -> tuple[Tensor, Tensor]:
    """Placeholders for the random state, which is not read without dropout."""
    return torch.zeros(2, dtype=torch.uint64, device=q.device), torch.empty(0, device=q.device)
