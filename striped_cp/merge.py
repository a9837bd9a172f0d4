"""Accumulating a tile's partial results into the outputs and gradients of all tiles.

Partial results are merged in float32 (float64 stays float64), whatever the inputs' dtype, so that
the error does not grow with the number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from .kernels.base import Partial, Region

_MERGE_VARIANTS = 256  # every layout, dtype, and packing of the tests in one process: 69


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def empty_sequence_major(x: Tensor, dtype: torch.dtype) -> Tensor:
    """(B, H, n, D) in memory order (B, n, H, D), that of a transformer's projections."""
    batch, heads, rows, dim = x.shape
    return x.new_empty(batch, rows, heads, dim, dtype=dtype).transpose(1, 2)


def sequence_major(x: Tensor) -> Tensor:
    """x (B, H, n, D) with memory order (B, n, H, D): a copy only if it is not already so."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


class OutputAccumulator:
    """Running attention output (B, H, n, D) and log-sum-exp (B, H, n) of a rank's query rows.

    The first partial results, of the diagonal tile, cover every row once and are written; later
    ones are merged in place. A first one of all rows is adopted, not copied, so that at any time
    one accumulated output and one partial result exist.
    """

    def __init__(self, query: Tensor) -> None:
        batch, heads, rows, _ = query.shape
        self.dtype = accumulation_dtype(query.dtype)
        self.lse = query.new_empty(batch, heads, rows, dtype=self.dtype)
        self._unwritten = self.lse.numel()
        self._query = query
        self._out: Tensor | None = None

    @property
    def out(self) -> Tensor:
        if self._out is None:
            self._out = empty_sequence_major(self._query, self.dtype)
        return self._out

    def add(self, partial: Partial) -> None:
        if self._unwritten:
            self._unwritten -= partial.lse.numel()
            self._write(partial)
        else:
            self._merge(partial)

    def add_sinks(self, sinks: Tensor) -> None:
        """Of each head (H,) a logit that belongs to no key; +inf takes all weight."""
        sinks = sinks.to(self.dtype)[:, None]
        self._out = self.out.to(self.dtype).mul_(torch.sigmoid(self.lse - sinks).unsqueeze(-1))
        torch.logaddexp(self.lse, sinks, out=self.lse)

    def _write(self, partial: Partial) -> None:
        partial.queries.of(self.lse).copy_(partial.lse)
        if partial.queries == Region(slice(None), 0, self.lse.shape[2]):
            self._out = partial.out
        else:
            partial.queries.of(self.out).copy_(partial.out)

    def _merge(self, partial: Partial) -> None:
        self._out = self.out.to(self.dtype)  # a copy once, if the adopted output has 16 bits
        merge = compiled_merge() if self._out.is_cuda else merge_
        merge(partial.queries.of(self._out), partial.queries.of(self.lse), partial.out, partial.lse)


def merge_(out: Tensor, lse: Tensor, new_out: Tensor, new_lse: Tensor) -> None:
    """Merge a partial result into `out` and `lse` in place; `lse` must be finite.

    With s = sigmoid(lse_new - lse): out <- out + s * (out_new - out) and
    lse <- log(exp(lse) + exp(lse_new)). Both stay finite however large the logits.

    Rows that saw no key have new_lse = -inf; some kernels write +inf for them instead.
    """
    new_lse = torch.where(new_lse == float("inf"), float("-inf"), new_lse.to(lse.dtype))
    out.lerp_(new_out.to(out.dtype), torch.sigmoid(new_lse - lse).unsqueeze(-1))
    lse.copy_(torch.logaddexp(lse, new_lse))


@cache
def compiled_merge() -> Callable[[Tensor, Tensor, Tensor, Tensor], None]:
    """`merge_` as one kernel that reads a 16-bit partial result without a float32 copy of it.

    A run compiles up to ten variants (blocks of stripes with documents; other layouts one to
    five), and torch.compile gives up after eight, without a word unless the graph must be whole.
    """
    compiled = torch.compile(merge_, dynamic=True, fullgraph=True)
    return torch._dynamo.config.patch(recompile_limit=_MERGE_VARIANTS)(compiled)


class GradientAccumulator:
    """Running sum (B, H, n, D) of blocks' gradients.

    Args:
        empty: nothing is in `total` yet. The blocks that come first, of the diagonal tile, cover
            every row once and are written.
    """

    def __init__(self, total: Tensor, empty: bool) -> None:
        self.total = total
        self._unwritten = total.numel() if empty else 0

    def add(self, region: Region, part: Tensor) -> None:
        if self._unwritten:
            self._unwritten -= part.numel()
            region.of(self.total).copy_(part)
        else:
            region.of(self.total).add_(part)


def sink_gradients(sinks: Tensor, out: Tensor, lse: Tensor, grad_out: Tensor) -> Tensor:
    """Gradient of a loss with respect to `sinks` (H,), over the rows of this rank.

    d sink = -sum over rows of exp(sink - lse) * (out . d out), with the final out (B, H, n, D) and
    lse (B, H, n), in which the sink is. A head at a time, for the sake of the float32 copies.
    """
    dtype = lse.dtype

    def of_head(h: int) -> Tensor:
        sink = sinks[h].to(dtype)
        # Where the sink takes all weight, both may be inf.
        weight = torch.where(sink == lse[:, h], 1, torch.exp(sink - lse[:, h]))
        return -(weight * (out[:, h].to(dtype) * grad_out[:, h].to(dtype)).sum(-1)).sum()

    return torch.stack([of_head(h) for h in range(len(sinks))]).to(sinks.dtype)
