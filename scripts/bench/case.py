"""What is measured: one shape of attention on one ring."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from striped_cp import Documents, Layout
from striped_cp.kernels import Kernel, Request, choose_kernel
from striped_cp.tiles import Tile, tiles_of_rank

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Case:
    """Shape, dtype and ring of a measurement.

    Attributes:
        ulysses: of the ranks, those that share heads.
        documents: lengths in tokens that sum to `seq_len`, the same in every batch row; None: one
            document.
        window: tokens that a token sees, itself included; None: all before it.
    """

    device: str
    world_size: int
    seq_len: int
    batch: int
    heads: int
    kv_heads: int
    head_dim: int
    dtype: str
    documents: tuple[int, ...] | None = None
    kernel: str = "auto"
    rotate_method: str = "ring"
    ulysses: int = 1
    window: int | None = None

    def __post_init__(self) -> None:
        if self.world_size % self.ulysses or self.heads % self.ulysses:
            raise ValueError(
                f"--ulysses {self.ulysses} must divide --world-size {self.world_size} and --heads "
                f"{self.heads}"
            )
        if self.heads % self.kv_heads:
            raise ValueError(
                f"--heads {self.heads} must be a multiple of --kv-heads {self.kv_heads}"
            )
        if self.documents is not None and sum(self.documents) != self.seq_len:
            raise ValueError(
                f"--documents must sum to --seq-len {self.seq_len}, not {sum(self.documents)}"
            )

    @property
    def scale(self) -> float:
        return 1 / math.sqrt(self.head_dim)

    def check(self, layouts: Iterable[Layout]) -> None:
        """Raise ValueError unless every layout can be measured."""
        self.chosen_kernel()
        for layout in layouts:
            layout.check(self.seq_len, self.world_size, self.ulysses)
            self.tiles(layout, self.world_size // self.ulysses, 0)

    def tiles(self, layout: Layout, ring_size: int, ring_rank: int) -> tuple[Tile, ...]:
        packed = self.packed()
        return tiles_of_rank(layout, self.seq_len, ring_size, ring_rank, packed, self.window)

    def packed(self) -> Documents | None:
        if self.documents is None:
            return None
        return Documents.from_cu_seqlens([list(accumulate(self.documents, initial=0))] * self.batch)

    def tensors(self, rows: int, rank: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Random query, key, value and output gradient of `rows` tokens, each (B, H, rows, D).

        Views of (B, rows, H, D), as a transformer's projections leave them.
        """
        generator = torch.Generator(self.device).manual_seed(rank)

        def random(heads: int) -> Tensor:
            shape = (self.batch, rows, heads, self.head_dim)
            x = torch.randn(shape, generator=generator, device=self.device, dtype=torch.float32)
            return x.to(DTYPES[self.dtype]).transpose(1, 2)

        return random(self.heads), random(self.kv_heads), random(self.kv_heads), random(self.heads)

    def chosen_kernel(self) -> Kernel:
        packed = self.documents is not None
        request = Request(self.device, DTYPES[self.dtype], self.head_dim, packed)
        return choose_kernel(self.kernel, request)
