"""Kernels that compute one full or causal block per call: the loop over a tile's blocks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from ..blocks import COUNT, K_LEN, K_START, Q_LEN, Q_START, ROW, Mask, Pass
from ..tiles import Tile
from .base import BackwardInputs, Inputs, Partial, PartialGradients, Region, Request


@dataclass(frozen=True)
class Block:
    """Rows of queries and of keys that one call computes."""

    queries: Region
    keys: Region


class DenseKernel(ABC):
    """Base of the kernels whose calls take whole blocks; subclasses supply the two calls.

    Attributes:
        takes_windows: whether `attend` and `attend_backward` serve passes with a window; if not,
            they get the same pairs in several passes without one.
    """

    takes_windows = False

    @abstractmethod
    def attend(self, x: Inputs, of: Pass, scale: float) -> tuple[Tensor, Tensor]:
        """(out, lse) of one block of a pass.

        If the pass is triangular, the block is square and row i sees keys j <= i: the rows of an
        anticausal one come in reverse order.
        """

    @abstractmethod
    def attend_backward(
        self, x: BackwardInputs, of: Pass, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(dq, dk, dv) of one block."""

    def forward(self, x: Inputs, tile: Tile, scale: float) -> Iterator[Partial]:
        for of, block in self._blocks(tile, x.query):
            # Calls of their own, here and below: a name in a generator would keep one block's
            # results until the next one's are there.
            yield self._forward_block(x, of, block, scale)

    def backward(self, x: BackwardInputs, tile: Tile, scale: float) -> Iterator[PartialGradients]:
        for of, block in self._blocks(tile, x.query):
            yield self._backward_block(x, of, block, scale)

    def _blocks(self, tile: Tile, query: Tensor) -> Iterator[tuple[Pass, Block]]:
        """What is computed at a time, and the pass that it is of."""
        for tile_pass in tile.passes:
            for plain in (tile_pass,) if self.takes_windows else tile_pass.unwindowed:
                for block in plain.blocks.tolist():
                    row, count = block[ROW], block[COUNT]
                    batch = slice(None) if tile.documents is None else slice(row, row + 1)
                    queries = Region(batch, block[Q_START], block[Q_LEN], count, plain.stride)
                    keys = Region(batch, block[K_START], block[K_LEN], count, plain.stride)
                    yield plain, Block(queries, keys)

    def _forward_block(self, x: Inputs, of: Pass, block: Block, scale: float) -> Partial:
        rows, cols, mask = block.queries, block.keys, of.mask
        query, key, value = x
        out, lse = self.attend(
            Inputs(_take(mask, rows, query), _take(mask, cols, key), _take(mask, cols, value)),
            of,
            scale,
        )
        return Partial(rows, _give(mask, rows, out), _give(mask, rows, lse))

    def _backward_block(
        self, x: BackwardInputs, of: Pass, block: Block, scale: float
    ) -> PartialGradients:
        rows, cols, mask = block.queries, block.keys, of.mask
        dq, dk, dv = self.attend_backward(
            BackwardInputs(
                *(
                    _take(mask, cols if name in ("key", "value") else rows, tensor)
                    for name, tensor in x._asdict().items()
                )
            ),
            of,
            scale,
        )
        return PartialGradients(
            rows, cols, _give(mask, rows, dq), _give(mask, cols, dk), _give(mask, cols, dv)
        )


def _take(mask: Mask, region: Region, x: Tensor) -> Tensor:
    """The region's rows as kernel input: repeats in the batch, anticausal rows reversed."""
    x = region.of(x)
    if region.count > 1:
        x = x.transpose(1, 2).flatten(0, 1)
    if mask is Mask.ANTICAUSAL:
        x = x.flip(2)
    return rowwise_dense(x) if x.dim() == 4 else x


def _give(mask: Mask, region: Region, x: Tensor) -> Tensor:
    """Inverse of `_take`: kernel output in the shape of `region.of`."""
    if mask is Mask.ANTICAUSAL:
        x = x.flip(2)
    return x.unflatten(0, (-1, region.count)).transpose(1, 2) if region.count > 1 else x


def refuse_16_bit_cuda(request: Request, max_head_dim: int) -> str | None:
    """Why a fused CUDA kernel of 16-bit numbers cannot serve, or None."""
    if request.device_type != "cuda":
        return f"it runs on CUDA devices, the tensors are on {request.device_type!r}"
    if (reason := refuse_old_gpu()) is not None:
        return reason
    if request.dtype not in (torch.float16, torch.bfloat16):
        return f"it computes in float16 or bfloat16, not {request.dtype}"
    if request.head_dim % 8 or request.head_dim > max_head_dim:
        return f"head_dim must be a multiple of 8 up to {max_head_dim}, not {request.head_dim}"
    return None


def refuse_old_gpu() -> str | None:
    """Why this process's GPU can run none of the fused kernels, or None.

    FlashAttention and cuDNN's attention as torch 2.13 builds them, and Triton 3, on which
    FlexAttention rests, begin with compute capability 8.0 (Ampere).
    """
    capability = compute_capability()
    if capability is None or capability >= (8, 0):
        return None
    major, minor = capability
    return f"it needs a GPU of compute capability 8.0 or later, this one has {major}.{minor}"


@cache
def compute_capability() -> tuple[int, int] | None:
    """None without a GPU, or where it is none of NVIDIA's."""
    if torch.version.hip is not None or not torch.cuda.is_available():
        return None
    return torch.cuda.get_device_capability()


def rowwise_dense(x: Tensor) -> Tensor:
    """x, copied if its last dim is strided: CUDA kernels refuse it, the CPU kernel misreads it."""
    return x if x.stride(-1) == 1 else x.contiguous()
