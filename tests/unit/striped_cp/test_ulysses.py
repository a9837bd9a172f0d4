"""Two axes in one process: exact for every split of the ranks, and the messages that it takes."""

import itertools

import pytest
import torch

from striped_cp import Contiguous, Documents, HeadTail, Striped
from tests.helpers.loopback import random_inputs, run_loopback
from tests.helpers.own_layout import Snake
from tests.helpers.reference import check_all_close, reference_gradients

SEQ_LEN = 48
DOCUMENTS = Documents.from_cu_seqlens([[0, 7, 8, 30, 48], [0, 25, 26, 48]])
SPLITS = [(1, 2), (2, 1), (2, 2), (1, 4), (4, 1), (2, 3), (3, 2)]


@pytest.mark.parametrize("rotate_method", ["ring", "allgather"])
@pytest.mark.parametrize("packed", [False, True], ids=["", "packed"])
@pytest.mark.parametrize(("ring", "degree"), SPLITS)
def test_attention_and_gradients(ring, degree, packed, rotate_method):
    documents = DOCUMENTS if packed else None
    layouts = (Striped(), Striped(2), HeadTail(), Contiguous(), Snake())
    heads = 12 if 3 in (ring, degree) else 8
    for layout, kv_heads in itertools.product(layouts, (1, 2, 4, heads)):
        inputs = random_inputs(2, (heads, kv_heads), SEQ_LEN, 8, torch.float64)
        got = run_loopback(
            inputs,
            layout,
            ring * degree,
            documents,
            rotate_method=rotate_method,
            ulysses_degree=degree,
        )
        want = reference_gradients(*inputs, documents)
        check_all_close(got, want, f"{layout.spec} {kv_heads}")
