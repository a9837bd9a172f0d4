"""Accumulating a tile's partial results into the outputs and gradients of all tiles.

Partial results are merged in float32 (float64 stays float64), whatever the inputs' dtype, so that
the error does not grow with the number of ranks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .kernels.base import Partial, Region


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


class OutputAccumulator:
    """Running attention output (B, H, n, D) and log-sum-exp (B, H, n) of a rank's query rows.

    The first tile, the diagonal one, covers every row once and is written; later ones are merged
    in place: with s = sigmoid(lse_new - lse), out <- out + s * (out_new - out) and
    lse <- log(exp(lse) + exp(lse_new)). Both stay finite however large the logits.
    """

    def __init__(self, query: Tensor, value_dim: int) -> None:
        batch, heads, rows, _ = query.shape
        dtype = accumulation_dtype(query.dtype)
        # Memory order (B, n, H, D): what the output projection of a transformer reads.
        self.out = query.new_empty(batch, rows, heads, value_dim, dtype=dtype).transpose(1, 2)
        self.lse = query.new_empty(batch, heads, rows, dtype=dtype)

    def write(self, partial: Partial) -> None:
        partial.queries.of(self.out).copy_(partial.out)
        partial.queries.of(self.lse).copy_(partial.lse)

    def merge(self, partial: Partial) -> None:
        merge_(partial.queries.of(self.out), partial.queries.of(self.lse), partial.out, partial.lse)


def merge_(out: Tensor, lse: Tensor, new_out: Tensor, new_lse: Tensor) -> None:
    """Merge a partial result into `out` and `lse` in place; `lse` must be finite.

    Rows that saw no key have new_lse = -inf; some kernels write +inf for them instead.
    """
    new_lse = torch.where(new_lse == float("inf"), float("-inf"), new_lse.to(lse.dtype))
    out.lerp_(new_out.to(out.dtype), torch.sigmoid(new_lse - lse).unsqueeze(-1))
    lse.copy_(torch.logaddexp(lse, new_lse))


def accumulate_(total: Tensor, region: Region, part: Tensor, first: bool) -> None:
    """Add a block's gradient into `total`; the diagonal tile comes first and is written."""
    if first:
        region.of(total).copy_(part)
    else:
        region.of(total).add_(part)
