"""Ring attention: keys and values travel from rank to rank, queries stay.

In step t, rank p holds the keys and values of rank (p - t) mod P and computes one tile with them,
while the next are on their way. Partial outputs are merged by their log-sum-exps; with the final
ones, every tile's backward pass yields exact partial gradients (Ring Attention, arXiv 2310.01889).
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import closing

from torch import Tensor

from .kernels.base import BackwardInputs, Inputs, TileAttention
from .merge import (
    GradientAccumulator,
    OutputAccumulator,
    accumulation_dtype,
    empty_sequence_major,
    sequence_major,
)
from .ring import Ring
from .rotation import ROTATIONS, Rotation
from .tiles import Tile


def attention_forward(
    x: Inputs,
    tiles: Sequence[Tile],
    kernel: TileAttention,
    ring: Ring,
    scale: float,
    rotate_method: str,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Exact attention of this rank's queries over the keys of all ranks.

    Args:
        x: query (B, H, n, D), n = S/P; key and value (B, Hkv, n, D).
        tiles: this rank's tiles in ring order (`tiles_of_rank`).
        rotate_method: "ring", O(S/P) keys and values, or "allgather", O(S).
        sinks: (H,), the logit of one more key per head, whose value is 0.

    Returns:
        out (B, H, n, D) in the query's dtype and lse (B, H, n) in float32 (float64 for float64),
        over all keys of the sequence and the sink. Memory order of out is (B, n, H, D).
    """
    total = OutputAccumulator(x.query)
    # closing: a kernel that fails leaves no hop under way for the next ring to take as its own.
    with closing(_rotate(ROTATIONS[rotate_method], ring, x, len(tiles))) as keys_and_values:
        for step, (key, value) in enumerate(keys_and_values):
            for partial in kernel.forward(Inputs(x.query, key, value), tiles[step], scale):
                total.add(partial)
                del partial  # free before the next kernel call
    if sinks is not None:
        total.add_sinks(sinks)
    return sequence_major(total.out.to(x.query.dtype)), total.lse


def attention_backward(
    x: BackwardInputs,
    tiles: Sequence[Tile],
    kernel: TileAttention,
    ring: Ring,
    scale: float,
    rotate_method: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `attention_forward` with respect to query, key and value, in their dtypes.

    With the final out and lse, every tile's backward kernel yields exact partial gradients; sinks
    are in both of these.
    """
    dtype = accumulation_dtype(x.query.dtype)
    x = x._replace(grad_out=sequence_major(x.grad_out))
    dq = empty_sequence_major(x.query, dtype)
    sum_of_dq = GradientAccumulator(dq, empty=True)
    rotation = ROTATIONS[rotate_method]
    with (
        closing(_rotate(rotation, ring, x, len(tiles))) as keys_and_values,
        closing(rotation.gradients(ring, x.key, x.value, dtype, len(tiles))) as dkv,
    ):
        for step, (key, value) in enumerate(keys_and_values):
            parts = []
            held = x._replace(key=key, value=value)
            for part in kernel.backward(held, tiles[step], scale):
                sum_of_dq.add(part.queries, part.dq)
                parts.append((part.keys, part.dk, part.dv))
                del part
            dkv.add(step, parts)
            del parts
        dk, dv = dkv.home()
    return dq.to(x.query.dtype), dk.to(x.key.dtype), dv.to(x.value.dtype)


def _rotate(
    rotation: Rotation, ring: Ring, x: Inputs | BackwardInputs, steps: int
) -> Generator[tuple[Tensor, Tensor], None, None]:
    """Keys and values (B, Hkv, n, D) of every ring step."""
    key, value = (sequence_major(t).transpose(1, 2) for t in (x.key, x.value))
    with closing(rotation.keys_and_values(ring, key, value, steps)) as hops:
        for k, v in hops:
            yield k.transpose(1, 2), v.transpose(1, 2)
