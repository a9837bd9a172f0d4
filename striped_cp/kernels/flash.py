"""FlashAttention: version 2, which torch ships, and 3 and 4, which answer the same calls of torch.

torch gives the calls to another version that is installed when that is activated
(`torch.nn.attention.activate_flash_attention_impl`); each kernel here activates its own.

Without documents a block is one dense call. With documents a pass of a tile is one variable-length
call over the batch packed to (B * n) rows, whatever the number of documents.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from functools import cache
from typing import NamedTuple, TypeVar
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor
from torch.nn import attention

from ..blocks import COUNT, K_LEN, K_START, Q_LEN, Q_START, ROW, Mask, Pass
from ..tiles import Tile
from .base import BackwardInputs, Inputs, Partial, PartialGradients, Region, Request
from .dense import DenseKernel, compute_capability, refuse_16_bit_cuda, rowwise_dense

aten = torch.ops.aten
Result = TypeVar("Result", Partial, PartialGradients)


class FlashKernel(DenseKernel):
    """Version 2; or what the user has activated, which then is untried."""

    name = "flash"
    device_type: str | None = "cuda"
    version: str | None = None  # as torch calls it; None: its own

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
        _activate(self.version)
        if tile.documents is None:
            yield from super().forward(x, tile, scale)
            return
        for tile_pass in tile.passes:
            yield self._clean(_forward_pass(x, tile_pass, scale), tile_pass)

    def backward(self, x: BackwardInputs, tile: Tile, scale: float) -> Iterator[PartialGradients]:
        _activate(self.version)
        if tile.documents is None:
            yield from super().backward(x, tile, scale)
            return
        for tile_pass in tile.passes:
            yield self._clean(_backward_pass(x, tile_pass, scale), tile_pass)

    def _clean(self, result: Result, tile_pass: Pass) -> Result:
        """What a version leaves unwritten in the rows of no block, written."""
        return result


class InstalledFlashKernel(FlashKernel):
    """A later version, from a package of its own.

    Rows that see no key, or that no query sees: their gradients are memory as it was found
    (`torch.nn.attention._fa3`, torch 2.13: `empty_like`), their LSE is -inf.
    """

    capabilities: tuple[int, ...]
    module: str
    install: str

    def refuse(self, request: Request) -> str | None:
        reason = refuse_16_bit_cuda(request, max_head_dim=128)
        if reason is not None:
            return reason
        capability = compute_capability()
        if capability is not None and capability[0] not in self.capabilities:
            needed = " or ".join(f"{number}.x" for number in self.capabilities)
            has = ".".join(map(str, capability))
            return f"it needs a GPU of compute capability {needed}, this one has {has}"
        if not _is_installed(self.module):
            return f"{self.module} is not installed ({self.install})"
        if torch.are_deterministic_algorithms_enabled():
            return "that its backward is deterministic is not known, which torch was asked for"
        return None

    def _clean(self, result: Result, tile_pass: Pass) -> Result:
        if isinstance(result, Partial):
            idle = _idle_rows(tile_pass, result.out, Q_START, Q_LEN)
            return result._replace(
                out=result.out.masked_fill(idle[..., None], 0.0),
                lse=result.lse.masked_fill(idle, float("-inf")),
            )
        queries = _idle_rows(tile_pass, result.dq, Q_START, Q_LEN)[..., None]
        keys = _idle_rows(tile_pass, result.dk, K_START, K_LEN)[..., None]
        return result._replace(
            dq=result.dq.masked_fill(queries, 0.0),
            dk=result.dk.masked_fill(keys, 0.0),
            dv=result.dv.masked_fill(keys, 0.0),
        )


class Flash3Kernel(InstalledFlashKernel):
    name = "fa3"
    version = "FA3"
    capabilities = (9,)
    module = "flash_attn_interface"
    install = "FlashAttention's repository, hopper/: python setup.py install"


class Flash4Kernel(InstalledFlashKernel):
    name = "fa4"
    version = "FA4"
    capabilities = (9, 10)
    module = "flash_attn.cute.interface"
    install = "pip install flash-attn-4"


# What this module has activated.
_activated: str | None = None


def _activate(version: str | None) -> None:
    """Let torch's calls go to a version; None takes back what was activated here, and no more."""
    global _activated
    if version == _activated:
        return
    if version is None:
        attention.restore_flash_attention_impl()
    else:
        attention.activate_flash_attention_impl(version)
    _activated = version


@cache
def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # of its package
        return False


def _idle_rows(tile_pass: Pass, like: Tensor, start: int, length: int) -> Tensor:
    """bool (B, 1, n): the rows of (B, H, n, D) that are in no block of the pass."""
    batch, _, rows, _ = like.shape
    known = _idle.setdefault(tile_pass, {})
    if start not in known:
        blocks, offset = _repeated(tile_pass, rows)
        first = blocks[:, start] + offset
        borders = np.zeros(batch * rows + 1, np.int64)
        np.add.at(borders, first, 1)
        np.add.at(borders, first + blocks[:, length], -1)
        idle = torch.from_numpy(borders.cumsum()[:-1] == 0).view(batch, 1, rows)
        known[start] = idle.to(like.device)
    return known[start]


# By pass and column of its blocks, as long as a batch's plans.
_idle: WeakKeyDictionary[Pass, dict[int, Tensor]] = WeakKeyDictionary()


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
    blocks, offset = _repeated(tile_pass, rows)
    q, k = blocks[:, Q_START] + offset, blocks[:, K_START] + offset
    q_end, k_end = q + blocks[:, Q_LEN], k + blocks[:, K_LEN]
    q_gap = np.append(q, batch * rows) - np.insert(q_end, 0, 0)
    k_gap = np.append(k, batch * rows) - np.insert(k_end, 0, 0)
    segments = np.zeros((3 * len(blocks) + 2, 2), np.int64)
    segments[0::3, 0] = q_gap
    segments[1::3, 1] = k_gap
    segments[2::3] = blocks[:, [Q_LEN, K_LEN]]
    return segments[segments.any(axis=1)]


def _repeated(tile_pass: Pass, rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Every block by itself, and what its starts are off by in the packed rows."""
    counts = tile_pass.blocks[:, COUNT]
    blocks = np.repeat(tile_pass.blocks, counts, axis=0)
    repeat = np.arange(len(blocks)) - np.repeat(np.cumsum(counts) - counts, counts)
    return blocks, blocks[:, ROW] * rows + repeat * tile_pass.stride


def _pack(x: Tensor, reverse: bool) -> Tensor:
    """(B, H, n, D) -> (B * n, H, D)."""
    x = rowwise_dense(x).transpose(1, 2).flatten(0, 1)
    return x.flip(0) if reverse else x


def _unpack(x: Tensor, batch: int) -> Tensor:
    return x.unflatten(0, (batch, -1)).transpose(1, 2)


def _no_dropout_state(q: Tensor) -> tuple[Tensor, Tensor]:
    """Placeholders for the random state, which is not read without dropout."""
    return torch.zeros(2, dtype=torch.uint64, device=q.device), torch.empty(0, device=q.device)
