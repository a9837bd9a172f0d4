"""The axes of context parallelism: the ring, and inside it the ranks that share heads.

P = R x U ranks. Rank (r, u), index r U + u, is rank r of a ring of R and rank u of the U ranks that
trade sequence for heads (ulysses.py). A one-dimensional mesh is the ring alone, U = 1.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _resolve_process_group

from .layout import Layout

ULYSSES = "ulysses"


class Axis(NamedTuple):
    """One axis as this rank sees it: the name of its process group, "" for a rank alone."""

    group_name: str = ""
    size: int = 1
    rank: int = 0

    def group(self) -> dist.ProcessGroup:
        return _resolve_process_group(dist.GroupName(self.group_name))


class Axes(NamedTuple):
    ring: Axis
    ulysses: Axis

    @property
    def size(self) -> int:
        """P."""
        return self.ring.size * self.ulysses.size

    @property
    def rank(self) -> int:
        """Of this rank among the P."""
        return self.ring.rank * self.ulysses.size + self.ulysses.rank


def axes_of(mesh: DeviceMesh | None) -> Axes:
    """The axes of a mesh: the ring's, or the ring's and "ulysses"; None: a ring of one rank.

    Raises:
        ValueError: another mesh, or one of two axes whose ranks do not ascend.
    """
    if mesh is None:
        return Axes(Axis(), Axis())
    if not isinstance(mesh, DeviceMesh):
        raise ValueError(f"mesh must be a DeviceMesh or None, not a {type(mesh).__name__}")
    names = mesh.mesh_dim_names
    if mesh.ndim > 2 or (mesh.ndim == 2 and (names is None or names[1] != ULYSSES)):
        raise ValueError(
            f"mesh must have one dimension, the ring's, or two, the ring's and {ULYSSES!r}; got "
            f"{names or mesh.shape}. Pass its submesh, for example mesh['cp']"
        )
    # One axis goes by the order of its group. Compiled code does not look at ranks; what it works
    # on has been dealt out before.
    if mesh.ndim == 2 and not torch.compiler.is_compiling():
        check_order(mesh)
    axes = [_axis(mesh, dim) for dim in range(mesh.ndim)]
    return Axes(axes[0], axes[1] if len(axes) == 2 else Axis())


def check_order(mesh: DeviceMesh) -> None:
    """Raise ValueError where a mesh counts its ranks in another order than its groups do."""
    ranks = mesh.mesh
    if not all(bool((ranks.diff(dim=dim) > 0).all()) for dim in range(ranks.ndim)):
        raise ValueError(
            f"mesh has its ranks in the order {ranks.tolist()}: they must ascend along every axis, "
            "as process groups count them"
        )


def _axis(mesh: DeviceMesh, dim: int) -> Axis:
    size = mesh.size(dim)
    if size == 1:
        return Axis()
    return Axis(mesh.get_group(dim).group_name, size, mesh.get_local_rank(dim))


def local_positions(seq_len: int, *, mesh: DeviceMesh | None, layout: Layout) -> torch.Tensor:
    """Global position of every token of this rank: int64, shape (S/P,), strictly increasing."""
    axes = axes_of(mesh)
    return layout.positions(seq_len, axes.size, axes.rank, axes.ulysses.size)
