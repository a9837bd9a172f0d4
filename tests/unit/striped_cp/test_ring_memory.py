"""What a rank's forward pass holds at a time: one accumulated output and one partial result."""

import pytest
import torch

from striped_cp import Contiguous, Documents, HeadTail, Striped
from striped_cp.algorithm import attention_forward
from striped_cp.kernels import KERNELS
from striped_cp.kernels.base import Inputs
from striped_cp.loopback import loopback
from striped_cp.ring import Ring
from striped_cp.tiles import tiles_of_rank
from tests.helpers.live_bytes import LiveBytes
from tests.helpers.loopback import random_inputs

WORLD_SIZE, ROWS, HEADS, HEAD_DIM = 4, 256, 8, 64
OUTPUT_BYTES = ROWS * HEADS * HEAD_DIM * 4  # of a rank, in float32
DOCUMENTS = Documents.from_cu_seqlens([[0, 300, 500, WORLD_SIZE * ROWS]])


def peak(layout, dtype, documents) -> float:
    """Of the rank that holds most, in float32 outputs; inputs and receive buffers are left out."""
    seq_len = WORLD_SIZE * ROWS
    inputs = random_inputs(1, (HEADS, 1), seq_len, HEAD_DIM, dtype)[:3]

    def rank_main(ring: Ring) -> int:
        rows = layout.positions(seq_len, WORLD_SIZE, ring.rank)
        q, k, v = (x.transpose(1, 2)[:, rows].transpose(1, 2) for x in inputs)
        tiles = tiles_of_rank(layout, seq_len, WORLD_SIZE, ring.rank, documents)
        with LiveBytes() as live:
            attention_forward(Inputs(q, k, v), tiles, KERNELS["cpu"], ring, 0.1, "ring")
        # Views of the inputs were seen as well, and two buffers each for keys and values.
        return live.peak - sum(x.nbytes for x in (q, k, v)) - 2 * (k.nbytes + v.nbytes)

    return max(loopback(WORLD_SIZE, rank_main)) / OUTPUT_BYTES


@pytest.mark.parametrize("documents", [None, DOCUMENTS], ids=["plain", "packed"])
@pytest.mark.parametrize(
    ("layout", "dtype", "outputs"),
    [
        (Striped(), torch.float32, 2.0),
        (HeadTail(), torch.float32, 2.0),
        (Contiguous(), torch.float32, 2.0),
        # The partial result in 16 bits, and in float32 while it is merged.
        (Striped(), torch.bfloat16, 2.5),
        # Block stripes reverse a partial result, which takes another one.
        (Striped(16), torch.float32, 3.0),
    ],
    ids=lambda x: getattr(x, "spec", str(x)),
)
def test_outputs_alive_in_the_forward_pass(layout, dtype, outputs, documents):
    # log-sum-exps are 1/64 of an output each.
    assert peak(layout, dtype, documents) < outputs + 0.15
