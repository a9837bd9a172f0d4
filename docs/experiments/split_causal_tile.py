"""Does it pay to split a causal tile, so that the CPU kernel computes less of it in vain?

    python docs/experiments/split_causal_tile.py

Prints the time of a causal tile, forward and backward, over that of a full one: whole, and split
into causal squares of 512 and of 256 rows with full squares below them. Fastest of 5, CPU time of
one thread. docs/reference/performance.md has the answer.
"""

from time import thread_time

import numpy as np
import torch

from striped_cp import Contiguous
from striped_cp.blocks import Mask, Pass
from striped_cp.kernels import KERNELS
from striped_cp.kernels.base import BackwardInputs, Inputs
from striped_cp.merge import GradientAccumulator, OutputAccumulator
from striped_cp.tiles import Tile


def tile(*passes):
    return Tile(Contiguous(), None, 0, 1, 0, 0, None, passes)


def split(rows, side):
    """Causal squares of `side` rows, and full squares of 1, 2, 4, ... times as many."""
    yield Pass(Mask.CAUSAL, np.array([[0, 0, side, 0, side, rows // side]]), side)
    while side < rows:
        count = rows // (2 * side)
        yield Pass(Mask.FULL, np.array([[0, side, side, 0, side, count]]), 2 * side)
        side *= 2


def attend(q, k, v, grad, passes, kernel=KERNELS["cpu"], scale=0.1):
    started = thread_time()
    total = OutputAccumulator(q)
    # The causal squares cover every row once and are written; full squares are merged.
    for blocks in passes:
        for part in kernel.forward(Inputs(q, k, v), tile(blocks), scale):
            total.add(part)
    out, lse = total.out, total.lse
    sums = [GradientAccumulator(torch.empty_like(x), empty=True) for x in (q, k, v)]
    for blocks in passes:
        for part in kernel.backward(BackwardInputs(q, k, v, out, lse, grad), tile(blocks), scale):
            regions = part.queries, part.keys, part.keys
            for sum_, region, x in zip(sums, regions, (part.dq, part.dk, part.dv), strict=True):
                sum_.add(region, x)
    return thread_time() - started, out, *(sum_.total for sum_ in sums)


torch.set_num_threads(1)
shapes = (2048, 1, 1, 128), (4096, 1, 1, 128), (8192, 1, 1, 128), (8192, 8, 2, 64)
for rows, heads, kv_heads, dim in shapes:
    q, grad, k, v = (
        torch.randn(1, rows, h, dim).transpose(1, 2) for h in (heads, heads, kv_heads, kv_heads)
    )
    full = [Pass(Mask.FULL, np.array([[0, 0, rows, 0, rows, 1]]))]
    ways = [full, *([*split(rows, side)] for side in (rows, 512, 256))]
    runs = [[attend(q, k, v, grad, passes) for passes in ways] for _ in range(5)]
    _, whole, *splits = runs[0]
    for way in splits:
        for x, y in zip(way[1:], whole[1:], strict=True):
            torch.testing.assert_close(x, y, rtol=1e-3, atol=1e-3)
    full_s, *causal_s = (min(run[i][0] for run in runs) for i in range(len(ways)))
    print(rows, heads, kv_heads, dim, *(f"{s / full_s:.3f}" for s in causal_s))
