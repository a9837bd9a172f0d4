"""A tensor's sequence dimension to this rank's tokens and back, both differentiable."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from .axes import Axes, Axis, axes_of, local_positions
from .layout import TOKEN_STRIPES, Layout
from .process_group import all_gather_single


def shard_sequence(
    full: Tensor, *, mesh: DeviceMesh, layout: Layout = TOKEN_STRIPES, dim: int = 1
) -> Tensor:
    """This rank's tokens of a tensor that every rank of the ring holds whole.

    Args:
        full: any dtype, S elements in dimension `dim`; the same on every rank.

    Returns:
        `full` with S/P elements in dimension `dim`, those at `layout.positions`.

    `full` counts as one logical tensor, as a replicated DTensor does: its gradient, gathered from
    all ranks, is complete on each of them.

    Raises:
        ValueError: S does not suit layout and mesh, `ring_attention` takes no such mesh, the tensor
            has no such dimension, or is a DTensor.
    """
    axes = _check(full, mesh, dim)
    layout.check(full.shape[dim], axes.size, axes.ulysses.size)
    return _Shard.apply(full, mesh, layout, dim)


def unshard_sequence(
    local: Tensor, *, mesh: DeviceMesh, layout: Layout = TOKEN_STRIPES, dim: int = 1
) -> Tensor:
    """The whole sequence, in order, on every rank: inverse of `shard_sequence`.

    The result counts as one logical tensor: its gradient must be the same on every rank, and each
    rank takes the part that belongs to its tokens.

    Raises: as `shard_sequence`.
    """
    axes = _check(local, mesh, dim)
    layout.check(local.shape[dim] * axes.size, axes.size, axes.ulysses.size)
    return _Unshard.apply(local, mesh, layout, dim)


def _check(x: Tensor, mesh: DeviceMesh, dim: int) -> Axes:
    axes = axes_of(mesh)
    if isinstance(x, DTensor):
        raise ValueError(
            "expected a plain tensor, not a DTensor: pass x.full_tensor() or x.to_local()"
        )
    if not -x.dim() <= dim < x.dim():
        raise ValueError(f"dim = {dim}: the tensor has {x.dim()} dimensions")
    return axes


# Each is the other's derivative, and so differentiable any number of times.


class _Shard(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, full: Tensor, mesh: DeviceMesh, layout: Layout, dim: int) -> Tensor:
        ctx.where = mesh, layout, dim
        positions = local_positions(full.shape[dim], mesh=mesh, layout=layout)
        return full.index_select(dim, positions.to(full.device))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple:
        return _Unshard.apply(grad, *ctx.where), None, None, None


class _Unshard(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: Tensor, mesh: DeviceMesh, layout: Layout, dim: int) -> Tensor:
        ctx.where = mesh, layout, dim
        ring, ulysses = axes_of(mesh)
        # Ranks that share heads hold parts, in order, of what one rank of the ring holds.
        by_rank = _gather_rows(_gather_rows(local.movedim(dim, 0), ulysses), ring)
        order = torch.cat(
            [layout.positions(by_rank.shape[0], ring.size, rank) for rank in range(ring.size)]
        )
        in_sequence = torch.empty_like(by_rank).index_copy_(0, order.to(local.device), by_rank)
        return in_sequence.movedim(0, dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple:
        return _Shard.apply(grad, *ctx.where), None, None, None


def _gather_rows(x: Tensor, axis: Axis) -> Tensor:
    """The rows of all ranks of an axis, rank by rank."""
    x = x.contiguous()
    if axis.size == 1:
        return x
    # As bytes, because backends gather only some dtypes.
    mine = x.unsqueeze(-1).view(torch.uint8)
    everyone = mine.new_empty(axis.size * mine.shape[0], *mine.shape[1:])
    all_gather_single(everyone, mine, group=axis.group())
    return everyone.view(x.dtype).squeeze(-1)
