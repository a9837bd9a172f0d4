"""The protocol that every attention kernel follows, and the views it works on.

Shapes, in this folder: query (B, H, n, D), key and value (B, Hkv, n, D), out like query,
lse (B, H, n) float32 (float64 for float64 inputs), all of one tile: n = S/P local rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ..tiles import Tile


@dataclass(frozen=True)
class Region:
    """Rows of one block: `count` runs of `length` rows, `stride` apart, in some batch rows."""

    batch: slice
    start: int
    length: int
    count: int = 1
    stride: int = 0

    def of(self, x: Tensor) -> Tensor:
        """View of x (B, H, n[, D]): (b, H, length[, D]), or (b, H, count, length[, D])."""
        end = self.start + (self.count - 1) * self.stride + self.length
        x = x[self.batch, :, self.start : end]
        if self.count == 1:
            return x
        x = x.unfold(2, self.length, self.stride)  # (b, H, count, [D,] length)
        return x.transpose(-1, -2) if x.dim() == 5 else x


class Inputs(NamedTuple):
    """What attention is computed of: a tile, or a block of one."""

    query: Tensor
    key: Tensor
    value: Tensor


class BackwardInputs(NamedTuple):
    """What its gradients are computed of; out and lse are over all keys of all ranks."""

    query: Tensor
    key: Tensor
    value: Tensor
    out: Tensor
    lse: Tensor
    grad_out: Tensor


class Partial(NamedTuple):
    """Attention of some query rows over some of their keys, normalised over those keys alone."""

    queries: Region
    out: Tensor
    lse: Tensor


class PartialGradients(NamedTuple):
    """One block's share of the gradients; exact, given the final out and LSE of its query rows."""

    queries: Region
    keys: Region
    dq: Tensor
    dk: Tensor
    dv: Tensor


@dataclass(frozen=True)
class Request:
    """What a kernel is asked to serve: everything that decides whether it can.

    Attributes:
        packed: whether the sequence is cut into documents.
    """

    device_type: str
    dtype: torch.dtype
    head_dim: int
    packed: bool


class TileAttention(Protocol):
    """Attention over one tile, forward and backward: what a ring asks of a kernel.

    `forward` yields partial outputs that the caller merges, `backward` partial gradients that the
    caller sums. On the diagonal tile (query rank = key rank) those that come first cover every
    row of queries and keys exactly once, before others follow: the caller writes them.
    """

    def forward(self, x: Inputs, tile: Tile, scale: float) -> Iterator[Partial]: ...

    def backward(
        self, x: BackwardInputs, tile: Tile, scale: float
    ) -> Iterator[PartialGradients]: ...


class Kernel(TileAttention, Protocol):
    """A way to compute tiles that a user can name.

    Attributes:
        device_type: what it is made for; None: any, and for no speed.
    """

    name: str
    device_type: str | None

    def refuse(self, request: Request) -> str | None:
        """Why the kernel cannot serve, in one clause; None if it can."""
