"""The ring against dense attention, all ranks in one process."""

import pytest
import torch

from striped_cp import Contiguous, Documents, HeadTail, Striped
from striped_cp.algorithm import attention_backward, attention_forward
from striped_cp.kernels import KERNELS
from striped_cp.kernels.base import BackwardInputs, Inputs
from striped_cp.loopback import loopback
from striped_cp.tiles import tiles_of_rank
from tests.helpers.loopback import random_inputs, run_loopback
from tests.helpers.own_layout import Snake
from tests.helpers.reference import (
    NAMES,
    check_all_close,
    check_close,
    reference_gradients,
    relative_error,
)

LAYOUTS = [Striped(), Striped(4), HeadTail(), Contiguous(), Snake(2)]


def packing(seq_len: int, batch: int = 2) -> Documents:
    """Rows cut differently: one-token documents, odd lengths, one longer than a shard."""
    first = [0, 1, 2, seq_len // 3 | 1, seq_len - 2, seq_len]
    second = [0, seq_len // 5, seq_len // 5 + 1, seq_len]
    return Documents.from_cu_seqlens([first, second][:batch])


@pytest.mark.parametrize("rotate_method", ["ring", "allgather"])
@pytest.mark.parametrize("packed", [False, True], ids=["plain", "packed"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda x: x.spec)
@pytest.mark.parametrize("world_size", range(1, 9))
def test_parity_in_float64(world_size, layout, packed, rotate_method):
    seq_len = layout.divisor(world_size) * (5 if layout != Striped(4) else 3)
    inputs = random_inputs(2, (4, 2), seq_len, 8, torch.float64)
    documents = packing(seq_len) if packed and seq_len >= 8 else None
    got = run_loopback(inputs, layout, world_size, documents, rotate_method=rotate_method)
    check_all_close(got, reference_gradients(*inputs, documents))


@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (4, 1), (3, 3)])
@pytest.mark.parametrize("head_dim", [4, 12, 16])
@pytest.mark.parametrize("scale", [None, 0.3])
def test_heads_and_scale_with_large_logits(heads, head_dim, scale):
    for world_size in (2, 3, 4):
        for rows in (1, 2, 5, 7):
            inputs = random_inputs(1, heads, rows * world_size, head_dim, torch.float64, 3.0)
            got = run_loopback(inputs, Striped(), world_size, scale=scale)
            want = reference_gradients(*inputs, scale=scale)
            check_all_close(got, want)


@pytest.mark.parametrize("head_dim", [8, 64, 128, 256])
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda x: x.spec)
def test_cpu_kernel_in_float32(layout, head_dim):
    seq_len = layout.divisor(4) * 6
    documents = packing(seq_len)
    inputs = random_inputs(2, (4, 2), seq_len, head_dim, torch.float32, 2.0)
    for docs in (None, documents):
        got = run_loopback(inputs, layout, 4, docs, kernel="cpu")
        check_all_close(got, reference_gradients(*inputs, docs))


@pytest.mark.parametrize("amplitude", [30.0, 200.0])
def test_huge_logits_stay_finite_and_exact(amplitude):
    inputs = random_inputs(1, (2, 1), 24, 8, torch.float64, amplitude)
    got = run_loopback(inputs, Striped(), 4)
    check_close("out", got[0], reference_gradients(*inputs)[0], torch.float32)
    inputs = random_inputs(1, (2, 1), 24, 8, torch.float32, amplitude)
    assert all(x.isfinite().all() for x in run_loopback(inputs, Striped(), 4, kernel="cpu"))


@pytest.mark.parametrize("world_size", [32, 64])
def test_many_ranks(world_size):
    inputs = random_inputs(1, (2, 1), world_size * 3, 8, torch.float64)
    documents = packing(world_size * 3, 1)
    for layout in (Striped(), Contiguous()):
        got = run_loopback(inputs, layout, world_size, documents)
        check_all_close(got, reference_gradients(*inputs, documents))


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda x: x.spec)
def test_one_token_per_rank(layout):
    seq_len = layout.divisor(5)
    inputs = random_inputs(2, (2, 2), seq_len, 8, torch.float64)
    got = run_loopback(inputs, layout, 5)
    check_all_close(got, reference_gradients(*inputs))


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda x: x.spec)
def test_ring_and_allgather_give_the_same_numbers(layout):
    seq_len = layout.divisor(4) * 4
    inputs = random_inputs(2, (4, 2), seq_len, 16, torch.float32)
    for documents in (None, packing(seq_len)):
        ring = run_loopback(inputs, layout, 4, documents, kernel="cpu")
        gathered = run_loopback(
            inputs, layout, 4, documents, kernel="cpu", rotate_method="allgather"
        )
        for name, a, b in zip(NAMES, ring, gathered, strict=False):
            if layout in (Striped(4), Snake(2)) and name in ("dk", "dv"):
                # Several blocks of a tile add to one key row: summed in another order.
                check_close(name, a, b)
            else:
                assert torch.equal(a, b), name


def test_bfloat16_error_does_not_grow_with_the_ring():
    inputs = random_inputs(1, (4, 2), 512, 64, torch.bfloat16)
    want = reference_gradients(*inputs)
    errors = {
        world_size: list(
            map(relative_error, run_loopback(inputs, Striped(), world_size, kernel="cpu"), want)
        )
        for world_size in (1, 2, 4, 8)
    }
    for name, one, eight in zip(NAMES, errors[1], errors[8], strict=False):
        assert eight <= 2 * one, f"{name}: {one:.1e} at P = 1, {eight:.1e} at P = 8"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_results_have_the_inputs_dtype(dtype):
    inputs = random_inputs(1, (2, 1), 32, 16, dtype)
    got = run_loopback(inputs, Striped(), 4, kernel="cpu")
    assert [x.dtype for x in got] == [dtype] * 4
    check_all_close(got, reference_gradients(*inputs))


@pytest.mark.parametrize("rotate_method", ["ring", "allgather"])
def test_results_keep_no_other_rank_alive(rotate_method):
    """Outputs and gradients own their memory: none is a view of what all ranks sent."""
    inputs = random_inputs(1, (2, 1), 8, 4, torch.float32)

    def rank_main(ring):
        q, k, v, grad_out = (x[:, :, : 8 // ring.world_size] for x in inputs)
        tiles = tiles_of_rank(Striped(), 8, ring.world_size, ring.rank)
        options = (tiles, KERNELS["cpu"], ring, 0.5, rotate_method)
        out, lse = attention_forward(Inputs(q, k, v), *options)
        return out, *attention_backward(BackwardInputs(q, k, v, out, lse, grad_out), *options)

    for world_size in (1, 2, 4):
        for results in loopback(world_size, rank_main):
            assert [x.untyped_storage().nbytes() for x in results] == [x.nbytes for x in results]


def test_a_remote_value_changes_the_local_query_gradient():
    q, k, v, grad_out = random_inputs(1, (2, 2), 16, 8, torch.float64)
    before = run_loopback((q, k, v, grad_out), Striped(), 4)[1]
    v = v.clone()
    v[:, :, 1] += 1.0  # on rank 1
    after = run_loopback((q, k, v, grad_out), Striped(), 4)[1]
    assert not torch.allclose(before[:, :, 4], after[:, :, 4])  # token 4, on rank 0
    assert torch.equal(before[:, :, 0], after[:, :, 0])  # token 0 does not see token 1


def test_leak_probe():
    """Changing document 1 changes no other document's output or gradient."""
    documents = Documents.from_cu_seqlens([[0, 7, 12, 13, 22, 32], [0, 3, 11, 20, 31, 32]])
    inputs = random_inputs(2, (4, 2), 32, 8, torch.float64)
    changed = tuple(x.clone() for x in inputs)
    for row, end in ((0, 7), (1, 3)):
        for x in changed[:3]:
            x[row, :, :end] += 1.0
    for layout in LAYOUTS:
        a = run_loopback(inputs, layout, 4, documents)
        b = run_loopback(changed, layout, 4, documents)
        for name, x, y in zip(NAMES, a, b, strict=False):
            for row, end in ((0, 7), (1, 3)):
                assert torch.equal(x[row, :, end:], y[row, :, end:]), name
                assert not torch.equal(x[row, :, :end], y[row, :, :end]), name
