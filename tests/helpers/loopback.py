"""A whole sequence through the ring, all ranks in one process, and back in sequence order."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from striped_cp import Documents, Layout, ulysses
from striped_cp.kernels import KERNELS
from striped_cp.kernels.base import BackwardInputs, Inputs
from striped_cp.loopback import LoopbackRing, loopback
from striped_cp.ring import Pending, Ring
from striped_cp.tiles import tiles_of_rank


def random_inputs(
    batch: int,
    heads: tuple[int, int],
    seq_len: int,
    head_dim: int,
    dtype: torch.dtype,
    amplitude: float = 1.0,
    seed: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Query, key, value and output gradient of a whole sequence, with a projection's strides."""
    generator = torch.Generator().manual_seed(seed)
    num_heads, num_kv_heads = heads

    def tensor(h: int, factor: float = 1.0) -> Tensor:
        x = torch.randn(batch, seq_len, h, head_dim, dtype=torch.float64, generator=generator)
        return (x * factor).to(dtype).transpose(1, 2)

    return (
        tensor(num_heads, amplitude),
        tensor(num_kv_heads, amplitude),
        tensor(num_kv_heads),
        tensor(num_heads),
    )


class StrictRing(Ring):
    """A ring that uses what a network may: until the wait, what is received is NaN, and what is
    sent may be read at any time and must not change."""

    def __init__(self, ring: Ring) -> None:
        super().__init__(ring.rank, ring.world_size)
        self.ring = ring

    def shift(
        self, send: Sequence[Tensor], receive: Sequence[Tensor], distance: int = 1
    ) -> Pending:
        return _StrictHop(self.ring.shift(send, receive, distance), send, receive)

    def all_gather(self, out: Tensor, x: Tensor) -> Pending:
        return _StrictHop(self.ring.all_gather(out, x), (x,), (out,))

    def all_to_all(self, out: Tensor, x: Tensor) -> Pending:
        return _StrictHop(self.ring.all_to_all(out, x), (x,), (out,))


class _StrictHop:
    def __init__(self, pending: Pending, send: Sequence[Tensor], receive: Sequence[Tensor]) -> None:
        self.pending, self.send = pending, send
        self.posted = [x.clone() for x in send]
        for x in receive:
            x.fill_(float("nan"))

    def wait(self) -> None:
        for now, posted in zip(self.send, self.posted, strict=True):
            assert torch.equal(now, posted), "changed between the post and the wait"
        self.pending.wait()


def run_loopback(
    inputs: tuple[Tensor, Tensor, Tensor, Tensor],
    layout: Layout,
    world_size: int,
    documents: Documents | None = None,
    *,
    kernel: str = "reference",
    rotate_method: str = "ring",
    scale: float | None = None,
    ulysses_degree: int = 1,
    window: int | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """(out, dq, dk, dv) of whole sequences (B, H, S, D), computed by P loopback ranks.

    With sinks also their gradient, the sum of the ranks' shares.
    """
    query = inputs[0]
    seq_len = query.shape[2]
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    positions = [
        layout.positions(seq_len, world_size, rank, ulysses_degree) for rank in range(world_size)
    ]

    def rank_main(everyone: LoopbackRing) -> tuple[Tensor, ...]:
        q, k, v, grad_out = (x[:, :, positions[everyone.rank]] for x in inputs)
        ring, axis = map(StrictRing, everyone.split(ulysses_degree))
        tiles = tiles_of_rank(layout, seq_len, ring.world_size, ring.rank, documents, window)
        options = (axis, tiles, KERNELS[kernel], ring, scale, rotate_method, sinks)
        out, lse = ulysses.forward(Inputs(q, k, v), *options)
        x = BackwardInputs(q, k, v, out, lse, grad_out)
        return out, *ulysses.backward(x, *options)

    *by_rank, shares = zip(*loopback(world_size, rank_main), strict=True)
    order = torch.cat(positions).argsort()
    whole = tuple(torch.cat(parts, dim=2)[:, :, order] for parts in by_rank)
    return whole if sinks is None else (*whole, torch.stack(shares).sum(0))
