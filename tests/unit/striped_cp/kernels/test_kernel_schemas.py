"""The CUDA kernels' calls against the installed torch's operators, on the meta device.

No values: operator names, argument lists and the shapes of what comes back, where there is no GPU.
"""

import pytest
import torch

from striped_cp import Contiguous, Documents, HeadTail, Striped
from striped_cp.kernels import KERNELS
from striped_cp.kernels.base import BackwardInputs, Inputs
from striped_cp.tiles import tiles_of_rank

DOCUMENTS = Documents.from_cu_seqlens([[0, 3, 40, 128], [0, 1, 2, 128]])


@pytest.mark.parametrize(
    ("layout", "window"),
    [
        *((x, None) for x in (Striped(), Striped(8), HeadTail(), Contiguous())),
        *((x, 20) for x in (Striped(), HeadTail(), Contiguous())),
    ],
)
@pytest.mark.parametrize(
    ("kernel", "documents"), [("flash", None), ("flash", DOCUMENTS), ("cudnn", None)]
)
def test_calls_fit_the_operators(kernel, documents, layout, window):
    def tensor(heads):
        x = torch.empty(2, 32, heads, 64, dtype=torch.bfloat16, device="meta")
        return x.transpose(1, 2)

    q, grad_out, k, v = tensor(8), tensor(8), tensor(2), tensor(2)
    lse = torch.empty(2, 8, 32, device="meta")
    for tile in tiles_of_rank(layout, 128, 4, 1, documents, window):
        for part in KERNELS[kernel].forward(Inputs(q, k, v), tile, 0.1):
            assert part.out.shape == part.queries.of(q).shape
            assert part.lse.shape == part.queries.of(lse).shape
            assert (part.out.dtype, part.lse.dtype) == (torch.bfloat16, torch.float32)
        for part in KERNELS[kernel].backward(BackwardInputs(q, k, v, q, lse, grad_out), tile, 0.1):
            assert part.dq.shape == part.queries.of(q).shape
            assert part.dk.shape == part.keys.of(k).shape
            assert part.dv.shape == part.keys.of(v).shape
