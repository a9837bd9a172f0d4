"""Windows and sinks on gloo ranks: parity, hops that are not made, the right heads."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from striped_cp import Contiguous, Documents, HeadTail, Striped, ring_attention
from tests.distributed.test_ring_attention import attention_through_the_ring, ring_mesh
from tests.helpers.launch import run_ranks
from tests.helpers.loopback import random_inputs
from tests.helpers.reference import check_all_close, check_close, reference_gradients

SEQ_LEN = 24
DOCUMENTS = Documents.from_cu_seqlens([[0, 3, 24], [0, 13, 14, 24]])
SINKS = torch.linspace(-2, 4, 4, dtype=torch.float64)


def check_parity(mesh) -> None:
    """Also with heads shared; the ranks' shares of the sinks' gradient add up to the whole."""
    inputs = random_inputs(2, (4, 2), SEQ_LEN, 8, torch.float64)
    for layout in (Striped(), HeadTail(), Contiguous()):
        for window, rotate_method in ((1, "ring"), (5, "ring"), (5, "allgather"), (None, "ring")):
            for documents in (None, DOCUMENTS):
                sinks = SINKS.clone().requires_grad_()
                how = {"documents": documents, "window": window}
                got = attention_through_the_ring(
                    inputs, mesh, layout, sinks=sinks, rotate_method=rotate_method, **how
                )
                dist.all_reduce(sinks.grad)
                want = reference_gradients(*inputs, **how, sinks=SINKS)
                where = f"{layout.spec} {window} {rotate_method}"
                check_all_close((*got, sinks.grad), want, where)


def check_hops() -> None:
    """Contiguous, 6 tokens a rank: a window of 7 needs the neighbour's keys and no others."""
    mesh = ring_mesh(4)
    inputs = random_inputs(1, (2, 1), SEQ_LEN, 8, torch.float64)
    peers: list[list[int]] = []
    original = dist.batch_isend_irecv

    def spy(ops: list[dist.P2POp]):
        peers.append([(op.group_peer - dist.get_rank()) % 4 for op in ops if op.op is dist.isend])
        return original(ops)

    for layout, window, forward, backward in (
        (Contiguous(), 7, [[1, 1]], [[1, 1], [1, 1], [3, 3]]),
        (Contiguous(), 1, [], []),
        (Striped(), 7, [[1, 1]] * 3, [[1, 1]] * 7),
    ):
        with mock.patch.object(dist, "batch_isend_irecv", spy):
            peers.clear()
            attention_through_the_ring(inputs, mesh, layout, window=window)
        assert peers == [*forward, *backward], (layout, window)


def check_dtensors() -> None:
    """Heads over tensor-parallel ranks: sinks whole on every rank, plain or not, or sharded."""
    inputs = random_inputs(2, (4, 2), 10, 8, torch.float64)
    *wanted, want = reference_gradients(*inputs, window=4, sinks=SINKS)
    order = torch.cat([Striped().positions(10, 2, rank) for rank in range(2)])
    compiled = torch.compile(ring_attention, fullgraph=True, backend="aot_eager")
    for names, placements in ((("cp", "tp"), (Shard(2), Shard(1))), (("dp", "cp"), (0, Shard(2)))):
        placements = tuple(Shard(0) if x == 0 else x for x in placements)
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
        whole = [distribute_tensor(x[:, :, order].contiguous(), mesh, placements) for x in inputs]
        *leaves, grad_out = (x.requires_grad_() for x in whole)
        sharded = tuple(Shard(0) if x == Shard(1) else Replicate() for x in placements)
        shared = tuple(Partial() if x == Replicate() else x for x in sharded)
        for given, of_gradient in (
            (None, None),
            ((Replicate(), Replicate()), (Partial(), Partial())),
            (sharded, shared),
        ):
            sinks = SINKS if given is None else distribute_tensor(SINKS, mesh, given)
            sinks = sinks.detach().clone().requires_grad_()
            for attend in (ring_attention, compiled):
                out = attend(*leaves, mesh=mesh["cp"], window=4, sinks=sinks)
                *grads, dsinks = torch.autograd.grad(out, [*leaves, sinks], grad_out)
                whole_sequences = [x.full_tensor()[:, :, order.argsort()] for x in (out, *grads)]
                check_all_close(whole_sequences, wanted, str(given))
                if isinstance(dsinks, DTensor):
                    assert dsinks.placements == of_gradient
                    dsinks = dsinks.full_tensor()
                else:
                    dist.all_reduce(dsinks)
                check_close("dsinks", dsinks, want)
    wrong = distribute_tensor(SINKS, mesh, (Shard(0), Replicate()))
    with pytest.raises(ValueError, match=r"sinks: placements .*Shard\(dim=0\).* cannot work"):
        ring_attention(*leaves, mesh=mesh["cp"], sinks=wrong)
    with pytest.raises(ValueError, match=r"sinks must have shape \(4,\), one logit for each"):
        ring_attention(*leaves, mesh=mesh["cp"], sinks=SINKS[:2])


def check_all() -> None:
    check_parity(ring_mesh(4))
    check_parity(init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "ulysses")))
    check_hops()
    check_dtensors()


def test_windows_and_sinks():
    run_ranks(4, check_all, timeout=200)
