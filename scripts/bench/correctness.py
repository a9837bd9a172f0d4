"""A kernel in a ring against plain attention in float32, forward and backward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from striped_cp import Documents, Layout
from striped_cp.algorithm import attention_backward, attention_forward
from striped_cp.kernels import KERNELS
from striped_cp.kernels.base import BackwardInputs, Inputs, TileAttention
from striped_cp.loopback import loopback
from striped_cp.ring import Ring
from striped_cp.tiles import tiles_of_rank

from .case import DTYPES

WORLD_SIZE = 4
HEAD_DIM = 64
# Of the largest value, a few units in the last place of the dtype.
TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2, "float16": 3e-3}


@dataclass(frozen=True)
class Check:
    kernel: str
    layout: Layout
    packed: bool
    dtype: str
    heads: int
    kv_heads: int
    rows: int

    @property
    def documents(self) -> Documents | None:
        """Two batch rows, cut differently; one has documents shorter than the ring."""
        end = WORLD_SIZE * self.rows
        cuts = [[0, 1, 3, 6, end // 3, end - 1, end], [0, end // 2 + 1, end]]
        return Documents.from_cu_seqlens(cuts) if self.packed else None


def check(what: Check, device: str) -> dict[str, Any]:
    """Largest error of out, dq, dk and dv, relative to the largest value of each."""
    # torch.compile gives up after some shapes of a function: each case begins anew.
    torch.compiler.reset()
    generator = torch.Generator(device).manual_seed(0)

    def random(heads: int) -> Tensor:
        shape = (2, what.rows, heads, HEAD_DIM)
        x = torch.randn(WORLD_SIZE, *shape, generator=generator, device=device)
        return x.to(DTYPES[what.dtype]).transpose(2, 3)

    # By rank: query, key, value and the gradient of the output.
    inputs = [random(heads) for heads in (what.heads, what.kv_heads, what.kv_heads, what.heads)]
    got = _ring(what, inputs, KERNELS[what.kernel])
    want = _ring(what, [x.float() for x in inputs], KERNELS["reference"])
    errors = {
        name: float((x.float() - y).abs().max() / y.abs().max())
        for name, x, y in zip(("out", "dq", "dk", "dv"), got, want, strict=True)
    }
    return {
        "kernel": what.kernel,
        "layout": what.layout.spec,
        "packed": what.packed,
        "dtype": what.dtype,
        "heads": what.heads,
        "kv_heads": what.kv_heads,
        "rows": what.rows,
        "errors": errors,
        # Not "any too large": a NaN must fail.
        "ok": all(error <= TOLERANCE[what.dtype] for error in errors.values()),
    }


def _ring(what: Check, inputs: list[Tensor], kernel: TileAttention) -> list[Tensor]:
    """out, dq, dk, dv of all ranks, (P, B, H, n, D)."""
    seq_len = WORLD_SIZE * what.rows

    def rank_main(ring: Ring) -> tuple[Tensor, ...]:
        query, key, value, grad_out = (x[ring.rank] for x in inputs)
        tiles = tiles_of_rank(what.layout, seq_len, WORLD_SIZE, ring.rank, what.documents)
        how = tiles, kernel, ring, HEAD_DIM**-0.5, "ring"
        out, lse = attention_forward(Inputs(query, key, value), *how)
        return out, *attention_backward(BackwardInputs(query, key, value, out, lse, grad_out), *how)

    return [torch.stack(parts) for parts in zip(*loopback(WORLD_SIZE, rank_main), strict=True)]
