"""FlashAttention: version 2, which torch ships, and 3 and 4, which answer the same calls of torch.

torch gives the calls to another version that is installed when that is activated
(`torch.nn.attention.activate_flash_attention_impl`); each kernel here activates its own.

Without documents a block is one dense call. With documents varlen.py says which rows of a pass go
into which call.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor
from torch.nn import attention

from ..blocks import Mask, Pass
from ..tiles import Tile
from .base import BackwardInputs, Inputs, Partial, PartialGradients, Region, Request
from .dense import Block, DenseKernel, compute_capability, refuse_16_bit_cuda, rowwise_dense
from .varlen import Call, calls_of

aten = torch.ops.aten


class FlashKernel(DenseKernel):
    """Version 2; or what the user has activated, which then is untried."""

    name = "flash"
    takes_windows = True
    device_type: str | None = "cuda"
    version: str | None = None  # as torch calls it; None: its own
    writes_idle_rows = True

    def refuse(self, request: Request) -> str | None:
        return refuse_16_bit_cuda(request, max_head_dim=256)

    def attend(self, x: Inputs, of: Pass, scale: float) -> tuple[Tensor, Tensor]:
        q, k, v = (tensor.transpose(1, 2) for tensor in x)
        out, lse, *_ = aten._flash_attention_forward(
            *(q, k, v, None, None, q.shape[1], k.shape[1], 0.0, of.triangular, False),
            scale=scale,
            **_window(of),
        )
        return out.transpose(1, 2), lse

    def attend_backward(
        self, x: BackwardInputs, of: Pass, scale: float
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
            of.triangular,
            *_no_dropout_state(q),
            scale=scale,
            **_window(of),
        )
        dq, dk, dv = (x.transpose(1, 2) for x in grads)
        return dq, dk, dv

    def _blocks(self, tile: Tile, query: Tensor) -> Iterator[tuple[Pass, Block]]:
        _activate(self.version)
        if tile.documents is None:
            yield from super()._blocks(tile, query)
            return
        for tile_pass in tile.passes:
            for call in device_calls(tile_pass, query):
                yield tile_pass, call

    def _forward_block(self, x: Inputs, of: Pass, call: Block, scale: float) -> Partial:
        if not isinstance(call, VarlenCall):
            return super()._forward_block(x, of, call, scale)
        reverse = of.mask is Mask.ANTICAUSAL
        batch = call.queries.of(x.query).shape[0]
        q = _some(_pack(x.query, call.queries, reverse), call.query_rows)
        k, v = (_some(_pack(y, call.keys, reverse), call.key_rows) for y in (x.key, x.value))
        out, lse, *_ = aten._flash_attention_forward(
            *(q, k, v, *call.arguments, 0.0, of.triangular, False), scale=scale, **_window(of)
        )
        del q, k, v
        if not self.writes_idle_rows:
            out = out.index_fill(0, call.idle, 0.0)
            lse = lse.index_fill(1, call.idle, float("-inf"))
        if call.query_rows is not None:
            out = _among(out, call.query_rows, batch * call.queries.length)
            seen = lse
            lse = seen.new_full((len(seen), len(out)), float("-inf"))
            lse.index_copy_(1, call.query_rows, seen)
        if reverse:
            out, lse = out.flip(0), lse.flip(1)
        lse = lse.unflatten(1, (batch, -1)).transpose(0, 1)
        return Partial(call.queries, _unpack(out, batch), lse)

    def _backward_block(
        self, x: BackwardInputs, of: Pass, call: Block, scale: float
    ) -> PartialGradients:
        if not isinstance(call, VarlenCall):
            return super()._backward_block(x, of, call, scale)
        reverse = of.mask is Mask.ANTICAUSAL
        batch = call.queries.of(x.query).shape[0]
        q, o, g = (
            _some(_pack(y, call.queries, reverse), call.query_rows)
            for y in (x.query, x.out, x.grad_out)
        )
        k, v = (_some(_pack(y, call.keys, reverse), call.key_rows) for y in (x.key, x.value))
        lse = call.queries.of(x.lse).transpose(0, 1).flatten(1)
        if reverse:
            lse = lse.flip(1)
        if call.query_rows is not None:
            lse = lse.index_select(1, call.query_rows)
        dq, *dkv = aten._flash_attention_backward(
            g,
            q,
            k,
            v,
            o,
            lse.contiguous(),
            *call.arguments,
            0.0,
            of.triangular,
            *_no_dropout_state(q),
            scale=scale,
            **_window(of),
        )
        del g, q, k, v, o
        if not self.writes_idle_rows:
            dq = dq.index_fill(0, call.idle, 0.0)
        dq = _among(dq, call.query_rows, batch * call.queries.length)
        dkv = [_among(y, call.key_rows, batch * call.keys.length) for y in dkv]
        dq, dk, dv = (_unpack(y.flip(0) if reverse else y, batch) for y in (dq, *dkv))
        return PartialGradients(call.queries, call.keys, dq, dk, dv)


class InstalledFlashKernel(FlashKernel):
    """A later version, from a package of its own.

    In rows that see no key it leaves memory as it found it (`torch.nn.attention._fa3`, torch 2.13:
    `empty_like`).
    """

    writes_idle_rows = False
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


@dataclass(frozen=True)
class VarlenCall(Block):
    """A `varlen.Call` of several blocks as the kernel takes it.

    Attributes:
        arguments: cu_seqlens of queries and of keys, int32 on the device; longest segment of each.
        query_rows, key_rows, idle: as in `varlen.Call`, int64 on the device.
    """

    arguments: tuple[Tensor, Tensor, int, int]
    query_rows: Tensor | None
    key_rows: Tensor | None
    idle: Tensor


# Built on a pass's first use in a batch, then shared by all layers, forward and backward.
_calls: WeakKeyDictionary[Pass, dict[torch.device, list[Block]]] = WeakKeyDictionary()


def device_calls(tile_pass: Pass, query: Tensor) -> list[Block]:
    """The calls of a pass; what they need on the query's device goes there in one piece."""
    calls = _calls.setdefault(tile_pass, {})
    if query.device not in calls:
        batch, _, rows, _ = query.shape
        on_host = calls_of(tile_pass, batch, rows)
        lists = [part for call in on_host for part in _device_parts(call)]
        packed = torch.from_numpy(np.concatenate(lists))
        if query.is_cuda:
            packed = packed.pin_memory()
        parts = iter(
            packed.to(query.device, non_blocking=True).split([len(part) for part in lists])
        )
        calls[query.device] = [_on_device(call, parts, batch, rows) for call in on_host]
    return calls[query.device]


def _device_parts(call: Call) -> list[np.ndarray]:
    """int64: cu_seqlens of queries and of keys, rows that are passed, idle rows."""
    segments = np.empty((0, 2), np.int64) if call.segments is None else call.segments
    cu_seqlens = np.concatenate([np.zeros((1, 2), np.int64), segments.cumsum(0)])
    rows = [call.idle[:0] if x is None else x for x in (call.query_rows, call.key_rows)]
    return [cu_seqlens[:, 0], cu_seqlens[:, 1], *rows, call.idle]


def _on_device(call: Call, parts: Iterator[Tensor], batch: int, rows: int) -> Block:
    cu_q, cu_k, query_rows, key_rows, idle = (next(parts) for _ in range(5))
    regions = _region(call.queries, batch, rows), _region(call.keys, batch, rows)
    if call.segments is None:
        return Block(*regions)
    # An upper bound serves. With 1, torch's kernel regroups the queries of grouped-query
    # attention as (segments, heads, D), which counts empty segments too (torch 2.13).
    longest_q, longest_k = call.segments.max(0).clip(2).tolist()
    return VarlenCall(
        *regions,
        (cu_q.int(), cu_k.int(), longest_q, longest_k),
        None if call.query_rows is None else query_rows,
        None if call.key_rows is None else key_rows,
        idle,
    )


def _region(packed: tuple[int, int], batch: int, rows: int) -> Region:
    first, end = packed
    if end - first > rows:
        return Region(slice(None), 0, rows)
    row, start = divmod(first, rows)
    return Region(slice(row, row + 1), start, end - first)


def _pack(x: Tensor, region: Region, reverse: bool) -> Tensor:
    """(B, H, n, D) -> (rows, H, D) of the region."""
    x = rowwise_dense(region.of(x)).transpose(1, 2).flatten(0, 1)
    return x.flip(0) if reverse else x


def _some(x: Tensor, rows: Tensor | None) -> Tensor:
    return x if rows is None else x.index_select(0, rows)


def _among(x: Tensor, rows: Tensor | None, count: int) -> Tensor:
    """Inverse of `_some`, 0 elsewhere."""
    return x if rows is None else x.new_zeros(count, *x.shape[1:]).index_copy_(0, rows, x)


def _unpack(x: Tensor, batch: int) -> Tensor:
    return x.unflatten(0, (batch, -1)).transpose(1, 2)


def _window(of: Pass) -> dict[str, int]:
    """The window arguments: keys that a row sees before its own, and after.

    Causal is aligned to the bottom right of a segment and the window with it: query rows that see
    nothing, at the beginning of a segment, shift neither.
    """
    if of.window is None:
        return {}
    return {"window_size_left": of.window - 1, "window_size_right": 0}


def _no_dropout_state(q: Tensor) -> tuple[Tensor, Tensor]:
    """Placeholders for the random state, which is not read without dropout."""
    return torch.zeros(2, dtype=torch.uint64, device=q.device), torch.empty(0, device=q.device)
