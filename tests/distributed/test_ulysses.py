"""Ring times Ulysses on four gloo ranks: plain tensors, DTensors, compiled, and what is sent."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import parallelize_module
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from striped_cp import (
    Documents,
    HeadTail,
    Striped,
    StripedContextParallel,
    ring_attention,
    shard_sequence,
    unshard_sequence,
)
from striped_cp.axes import local_positions
from tests.distributed.test_ring_attention import attention_through_the_ring
from tests.helpers.launch import run_ranks
from tests.helpers.loopback import random_inputs
from tests.helpers.reference import check_all_close, check_close, reference_gradients

SEQ_LEN = 24
DOCUMENTS = Documents.from_cu_seqlens([[0, 3, 24], [0, 13, 14, 24]])


def mesh_of(ring: int, degree: int):
    return init_device_mesh("cpu", (ring, degree), mesh_dim_names=("cp", "ulysses"))


def check_parity() -> None:
    for ring, degree in ((2, 2), (1, 4), (4, 1)):
        mesh = mesh_of(ring, degree)
        for layout in (Striped(), Striped(2), HeadTail()):
            for heads in ((8, 2), (4, 1)):
                inputs = random_inputs(2, heads, SEQ_LEN, 8, torch.float64)
                for documents in (None, DOCUMENTS):
                    how = {"documents": documents, "rotate_method": "ring"}
                    got = attention_through_the_ring(inputs, mesh, layout, **how)
                    want = reference_gradients(*inputs, documents)
                    check_all_close(got, want, f"{ring}x{degree} {layout.spec} {heads}")


def check_shard_and_unshard() -> None:
    for ring, degree in ((2, 2), (1, 4), (4, 1)):
        mesh = mesh_of(ring, degree)
        full = torch.arange(2 * SEQ_LEN).view(2, SEQ_LEN)
        local = shard_sequence(full, mesh=mesh, layout=HeadTail())
        rows = HeadTail().positions(SEQ_LEN, 4, dist.get_rank(), degree)
        assert torch.equal(rows, local_positions(SEQ_LEN, mesh=mesh, layout=HeadTail()))
        assert torch.equal(local, full[:, rows])
        assert torch.equal(unshard_sequence(local, mesh=mesh, layout=HeadTail()), full)
    with pytest.raises(ValueError, match=r"multiple of 4 for .* on 4 ranks; nearest: 4 or 8"):
        shard_sequence(torch.zeros(1, 6), mesh=mesh_of(1, 4))
    snake = DeviceMesh("cpu", [[0, 1], [3, 2]], mesh_dim_names=("cp", "ulysses"))
    with pytest.raises(ValueError, match=r"in the order \[\[0, 1\], \[3, 2\]\]: they must ascend"):
        shard_sequence(full, mesh=snake)
    x = torch.randn(1, 2, 6, 8)
    with pytest.raises(ValueError, match="2 query heads do not divide over the 4 ranks"):
        ring_attention(x, x, x, mesh=mesh_of(1, 4))


def check_dtensors() -> None:
    """Sequence over two axes; and heads over tensor-parallel ranks, which keep their own."""
    inputs = random_inputs(2, (8, 4), SEQ_LEN, 8, torch.float64)
    want = reference_gradients(*inputs, DOCUMENTS)
    for sizes, names, placements in (
        ((2, 2), ("cp", "ulysses"), (Shard(2), Shard(2))),
        ((1, 2, 2), ("cp", "ulysses", "tp"), (Shard(2), Shard(2), Shard(1))),
    ):
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
        ring = mesh["cp", "ulysses"]
        size, degree = ring.size(), ring.size(1)
        # Tokens in the order in which the ranks hold them, so that Shard(2) deals out stripes.
        order = torch.cat([Striped().positions(SEQ_LEN, size, r, degree) for r in range(size)])
        whole = [
            distribute_tensor(x[:, :, order].contiguous(), mesh, placements).requires_grad_()
            for x in inputs
        ]
        module = parallelize_module(nn.Identity(), ring, StripedContextParallel())
        for attend in (module, torch.compile(module, fullgraph=True, backend="aot_eager")):
            out = attend(*whole[:3], documents=DOCUMENTS, enable_gqa=True)
            assert out.placements == placements
            grads = torch.autograd.grad(out, whole[:3], whole[3])
            whole_sequences = [x.full_tensor()[:, :, order.argsort()] for x in (out, *grads)]
            check_all_close(whole_sequences, want, str(names))


def check_compiled() -> None:
    mesh = mesh_of(2, 2)
    q, k, v = (x[:, :, :6] for x in random_inputs(1, (4, 2), SEQ_LEN, 8, torch.float32)[:3])
    projection = nn.Linear(8, 8)

    def block(q, k, v):
        return projection(ring_attention(projection(q), k, v, mesh=mesh))

    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    want, got = (f(q, k, v) for f in (block, compiled))
    check_close("out", got.detach(), want.detach())
    want, got = (torch.autograd.grad(x.sum(), projection.weight)[0] for x in (want, got))
    check_close("gradient", got, want)


class Block(nn.Module):
    def __init__(self, mesh) -> None:
        super().__init__()
        self.projection = nn.Linear(8, 8)
        self.mesh = mesh

    def forward(self, q, k, v):
        q, k, v = (self.projection(x) for x in (q, k, v))
        return ring_attention(q, k, v, mesh=self.mesh).square()


def keep_attention(ctx, op, *args, **kwargs):
    from torch.utils.checkpoint import CheckpointPolicy

    if op is torch.ops.striped_cp.ring_attention.default:
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


def check_messages() -> None:
    """All-to-alls of one layer, in elements sent to other ranks; none is repeated."""
    mesh = mesh_of(2, 2)
    block = Block(mesh)
    heads, kv_heads, rows, dim = 8, 2, 6, 8
    inputs = [x[:, :, :rows] for x in random_inputs(1, (heads, kv_heads), 24, dim, torch.float32)]
    q, kv = heads * rows * dim, kv_heads * rows * dim
    posted: list[int] = []
    original = dist.all_to_all_single

    def spy(out, x, **how):
        posted.append(x.numel() // 2)
        return original(out, x, **how)

    def run(attend):
        posted.clear()
        with mock.patch.object(dist, "all_to_all_single", spy):
            out = attend(*inputs[:3])
            forward, posted[:] = list(posted), []
            out.sum().backward()
        return forward, list(posted)

    def kept(*x):
        contexts = lambda: create_selective_checkpoint_contexts(keep_attention)  # noqa: E731
        return checkpoint(block, *x, use_reentrant=False, context_fn=contexts)

    forward = [(q + 2 * kv) // 2, q // 2]
    backward = [(3 * q + 2 * kv) // 2, (q + 2 * kv) // 2]
    for attend in (block, kept):
        assert run(attend) == (forward, backward)
    recomputed = run(lambda *x: checkpoint(block, *x, use_reentrant=False))
    assert recomputed == (forward, forward + backward)


def check_order_of_collectives() -> None:
    """Compiled and sharded blocks: all ranks meet in the same collectives, in the same order.

    Where a compiler moves an all-to-all on one rank past a gather that another has not reached,
    training hangs.
    """
    mesh = mesh_of(2, 2)
    blocks = nn.ModuleList(Block(mesh) for _ in range(2))
    for block in blocks:
        block.compile(fullgraph=True, backend="aot_eager")
        fully_shard(block, mesh=init_device_mesh("cpu", (4,)))
    inputs = [x[:, :, :6] for x in random_inputs(1, (4, 2), SEQ_LEN, 8, torch.float32)[:3]]
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        out = sum(block(*inputs).sum() for block in blocks)
        out.backward()
    mine = [event.name for event in recorded.events() if event.name.startswith("c10d::")]
    assert {"c10d::alltoall_base_", "c10d::_allgather_base_"} <= set(mine), mine
    everyone: list[list[str]] = [[] for _ in range(4)]
    dist.all_gather_object(everyone, mine)
    assert everyone == [mine] * 4


def check_all() -> None:
    check_parity()
    check_shard_and_unshard()
    check_dtensors()
    check_compiled()
    check_messages()
    check_order_of_collectives()


def test_ring_times_ulysses():
    run_ranks(4, check_all, timeout=200)
