"""The ring: keys and values travel from rank to rank, queries stay.

In step t, rank p holds the keys and values of rank (p - t) mod P and computes one tile with them.
The next hop is posted before the tile's kernel starts, so it travels while the kernel runs. In the
backward pass the gradients dK, dV travel behind their keys, in float32, one hop after each tile,
and are home after P hops.

    step          0        1        2                    hops in a step
    rank 0     k0 v0    k2 v2    k1 v1     forward       k v
    rank 1     k1 v1    k0 v0    k2 v2     backward      k v (P - 1 times), dk dv (P times)
    rank 2     k2 v2    k1 v1    k0 v0

`attention_forward` and `attention_backward` are the algorithm; a `Ring` is how ranks talk:
over torch.distributed (process_group.py), or all P ranks as threads of one process (loopback.py).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Sequence
from contextlib import closing
from typing import Protocol

import torch
from torch import Tensor

from .kernels.base import Region, TileAttention
from .merge import OutputAccumulator, accumulate_, accumulation_dtype, empty_sequence_major
from .tiles import Tile

Tensors = tuple[Tensor, ...]
Buffers = dict[tuple[str, int], Tensors]
# Rows of a tile's keys, and a block's dK and dV for them.
KeyGradients = tuple[Region, Tensor, Tensor]


class Pending(Protocol):
    """A hop under way; between the post and `wait` neither end may be touched."""

    def wait(self) -> None: ...


class Ring(ABC):
    """One rank's end of the ring.

    Tensors passed in are contiguous, of the same shapes and dtypes on all ranks, and all ranks make
    the same calls in the same order.
    """

    def __init__(self, rank: int, world_size: int, buffers: Buffers | None = None) -> None:
        self.rank = rank
        self.world_size = world_size
        self._buffers: Buffers = {} if buffers is None else buffers

    @abstractmethod
    def shift(self, send: Sequence[Tensor], receive: Sequence[Tensor]) -> Pending:
        """Post a hop: `send` to rank + 1, `receive` filled from rank - 1."""

    @abstractmethod
    def all_gather(self, out: Tensor, x: Tensor) -> Pending:
        """Post out[r] = x of rank r; out (P, *x.shape)."""

    @abstractmethod
    def all_to_all(self, out: Tensor, x: Tensor) -> Pending:
        """Post out[r] = x[own rank] of rank r; both (P, ...)."""

    def buffers(self, role: str, slot: int, like: Sequence[Tensor]) -> Tensors:
        """Receive buffers, the same ones in every ring step of every layer."""
        held = self._buffers.get((role, slot))
        if held is None or any(
            (a.shape, a.dtype, a.device) != (b.shape, b.dtype, b.device)
            for a, b in zip(held, like, strict=True)
        ):
            held = self._buffers[role, slot] = tuple(torch.empty_like(x) for x in like)
        return held


def attention_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    tiles: Sequence[Tile],
    kernel: TileAttention,
    ring: Ring,
    scale: float,
    rotate_method: str,
) -> tuple[Tensor, Tensor]:
    """Exact attention of this rank's queries over the keys of all ranks.

    Args:
        query: (B, H, n, D), n = S/P.
        key, value: (B, Hkv, n, D).
        tiles: this rank's tiles in ring order (`tiles_of_rank`).
        rotate_method: "ring", O(S/P) keys and values, or "allgather", O(S).

    Returns:
        out (B, H, n, D) in the query's dtype and lse (B, H, n) in float32 (float64 for float64),
        over all keys of the sequence. Memory order of out is (B, n, H, D).
    """
    total = OutputAccumulator(query)
    # closing: a kernel that fails leaves no hop under way for the next ring to take as its own.
    with closing(_rotate(ring, key, value, rotate_method)) as keys_and_values:
        for step, (k, v) in enumerate(keys_and_values):
            for partial in kernel.forward(query, k, v, tiles[step], scale):
                if step == 0:
                    total.write(partial)
                else:
                    total.merge(partial)
                del partial  # free before the next kernel call
    return _sequence_major(total.out.to(query.dtype)), total.lse


def attention_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    tiles: Sequence[Tile],
    kernel: TileAttention,
    ring: Ring,
    scale: float,
    rotate_method: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `attention_forward` with respect to query, key and value, in their dtypes.

    With the final out and lse, every tile's backward kernel yields exact partial gradients.
    """
    dtype = accumulation_dtype(query.dtype)
    grad_out = _sequence_major(grad_out)
    dq = empty_sequence_major(query, dtype)
    gather = rotate_method == "allgather"
    home = (_GatheredGradients if gather else _TravellingGradients)(ring, key, value, dtype)
    with closing(_rotate(ring, key, value, rotate_method)) as keys_and_values, closing(home) as dkv:
        for step, (k, v) in enumerate(keys_and_values):
            parts = []
            for part in kernel.backward(grad_out, query, k, v, out, lse, tiles[step], scale):
                accumulate_(dq, part.queries, part.dq, first=step == 0)
                parts.append((part.keys, part.dk, part.dv))
                del part
            dkv.add(step, parts)
            del parts
        dk, dv = dkv.home()
    return dq.to(query.dtype), dk.to(key.dtype), dv.to(value.dtype)


def _rotate(
    ring: Ring, key: Tensor, value: Tensor, rotate_method: str
) -> Generator[tuple[Tensor, Tensor], None, None]:
    """Keys and values of ranks p, p - 1, ..., p - P + 1, each while the next are on their way."""
    k, v = (_sequence_major(x).transpose(1, 2) for x in (key, value))  # contiguous (B, n, Hkv, D)
    gather = rotate_method == "allgather" and ring.world_size > 1
    yield from (_all_gather_kv if gather else _shift_kv)(ring, k, v)


def _shift_kv(ring: Ring, k: Tensor, v: Tensor) -> Generator[tuple[Tensor, Tensor], None, None]:
    """O(S/P) memory: the local keys and values and two buffers, one computed on, one arriving.

    A buffer fills again two steps later: what was yielded must be used up by the next step.
    """
    for step in range(ring.world_size - 1):
        arriving = ring.buffers("kv", step % 2, (k, v))
        pending = ring.shift((k, v), arriving)
        try:
            yield k.transpose(1, 2), v.transpose(1, 2)
        finally:
            pending.wait()
        k, v = arriving
    yield k.transpose(1, 2), v.transpose(1, 2)


def _all_gather_kv(
    ring: Ring, k: Tensor, v: Tensor
) -> Generator[tuple[Tensor, Tensor], None, None]:
    """One collective, O(S) memory; the local tile is computed while it runs."""
    mine = torch.stack((k, v))
    everyone = mine.new_empty(ring.world_size, *mine.shape)
    pending = ring.all_gather(everyone, mine)
    try:
        yield k.transpose(1, 2), v.transpose(1, 2)
    finally:
        pending.wait()
    for step in range(1, ring.world_size):
        k, v = everyone[(ring.rank - step) % ring.world_size]
        yield k.transpose(1, 2), v.transpose(1, 2)


class _TravellingGradients:
    """dK, dV of the keys at hand, O(S/P) memory.

    They arrive from the rank that held the keys before, grow by this rank's share and travel on:
    one buffer is sent while the other fills.
    """

    def __init__(self, ring: Ring, key: Tensor, value: Tensor, dtype: torch.dtype) -> None:
        self.ring = ring
        self.hops = ring.world_size if ring.world_size > 1 else 0
        mine = tuple(empty_sequence_major(x, dtype).transpose(1, 2) for x in (key, value))
        buffer = ring.buffers("dkv", 0, mine) if self.hops else ()
        # The two change places with every hop. The last one must arrive in memory of this call.
        self.current, self.other = (buffer, mine) if self.hops % 2 else (mine, buffer)
        self.pending: Pending | None = None

    def add(self, step: int, parts: Sequence[KeyGradients]) -> None:
        self._arrive()
        for region, *gradients in parts:
            for total, part in zip(self.current, gradients, strict=True):
                accumulate_(total.transpose(1, 2), region, part, first=step == 0)
        if self.hops:
            self.pending = self.ring.shift(self.current, self.other)

    def _arrive(self) -> None:
        if self.pending is not None:
            self.pending.wait()
            self.pending = None
            self.current, self.other = self.other, self.current

    def close(self) -> None:
        if self.pending is not None:
            self.pending.wait()

    def home(self) -> tuple[Tensor, ...]:
        self._arrive()
        return tuple(x.transpose(1, 2) for x in self.current)


class _GatheredGradients:
    """dK, dV of every rank's keys, O(S) memory, exchanged and summed at the end."""

    def __init__(self, ring: Ring, key: Tensor, value: Tensor, dtype: torch.dtype) -> None:
        self.ring = ring
        self.parts = [
            x.new_zeros(ring.world_size, *x.transpose(1, 2).shape, dtype=dtype)
            for x in (key, value)
        ]

    def add(self, step: int, parts: Sequence[KeyGradients]) -> None:
        owner = (self.ring.rank - step) % self.ring.world_size
        for region, *gradients in parts:
            for totals, part in zip(self.parts, gradients, strict=True):
                accumulate_(totals[owner].transpose(1, 2), region, part, first=step == 0)

    def close(self) -> None:
        pass

    def home(self) -> tuple[Tensor, ...]:
        size, rank = self.ring.world_size, self.ring.rank
        totals = []
        while self.parts:
            parts = self.parts.pop(0)  # freed before the next are received
            if size > 1:
                received = torch.empty_like(parts)
                self.ring.all_to_all(received, parts).wait()
                parts = received
            total = parts[rank].clone()  # not a view, which would keep all parts
            for step in range(1, size):
                total += parts[(rank + step) % size]
            totals.append(total.transpose(1, 2))
        return tuple(totals)


def _sequence_major(x: Tensor) -> Tensor:
    """x (B, H, n, D) with memory order (B, n, H, D): a copy only if it is not already so."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


class SingleRing(Ring):
    """A ring of one rank: nothing travels."""

    def __init__(self) -> None:
        super().__init__(0, 1)

    def shift(self, send: Sequence[Tensor], receive: Sequence[Tensor]) -> Pending:
        raise AssertionError("a ring of one rank has no neighbours")

    def all_gather(self, out: Tensor, x: Tensor) -> Pending:
        raise AssertionError("a ring of one rank has nothing to gather")

    def all_to_all(self, out: Tensor, x: Tensor) -> Pending:
        raise AssertionError("a ring of one rank has nothing to exchange")
