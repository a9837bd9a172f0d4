"""Which group the ring talks over, and what it leaves behind."""

from __future__ import annotations

import gc
import inspect
import math
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import distribute_tensor
from torch.distributed.tensor.placement_types import Shard

from recipes.parallel.ring import give_ring_its_groups
from striped_cp import ops, ring_attention, shard_sequence, unshard_sequence
from striped_cp.kernels import KERNELS
from tests.helpers.launch import run_ranks
from tests.helpers.loopback import random_inputs
from tests.helpers.model_step import make_dims
from tests.helpers.reference import check_close, reference_attention


def groups_of_training(degrees: dict[str, int]) -> tuple[str, str, str]:
    dims = make_dims(**degrees)
    give_ring_its_groups(dims, 1, timedelta(seconds=60))
    return tuple(dims.get_mesh(axis).get_group().group_name for axis in ("cp", "fsdp", "loss"))


@pytest.mark.parametrize("other", [{}, {"dp_shard": 2}, {"dp_replicate": 2}, {"pp": 2}, {"tp": 2}])
def test_training_gives_the_ring_a_group_of_its_own(other):
    """Also where FSDP shards over the ranks of one ring."""
    degrees = {"cp": 2, **other}
    for ring, fsdp, loss in run_ranks(math.prod(degrees.values()), groups_of_training, degrees):
        assert ring not in (fsdp, loss)


def options_with_nccl() -> Any:
    """What the ring's group is asked for where the backend is NCCL."""
    asked = []
    make = dist.new_subgroups_by_enumeration

    def record(ranks, timeout, backend, options, **how):
        asked.append((backend, options.is_high_priority_stream, options._timeout == timeout))
        return make(ranks, timeout, **how)

    with (
        mock.patch.object(dist, "get_backend", return_value="nccl"),
        mock.patch.object(
            dist, "ProcessGroupNCCL", SimpleNamespace(Options=SimpleNamespace), create=True
        ),
        mock.patch.object(dist, "new_subgroups_by_enumeration", record),
    ):
        groups_of_training({"cp": 2})
    return asked


def test_hops_overtake_kernels_on_nccl():
    assert run_ranks(2, options_with_nccl) == [[("nccl", True, True)]] * 2


def check_rank_order() -> None:
    """A mesh whose ranks are not in the world's order: tokens follow the mesh."""
    group = dist.new_group([1, 0], sort_ranks=False)
    mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("cp",))
    q, k, v, _ = random_inputs(1, (2, 1), 10, 8, torch.float64)
    local = [shard_sequence(x, mesh=mesh, dim=2) for x in (q, k, v)]
    out = unshard_sequence(ring_attention(*local, mesh=mesh), mesh=mesh, dim=2)
    check_close("out", out, reference_attention(q, k, v))


@pytest.mark.skipif(
    "sort_ranks" not in inspect.signature(dist.new_group).parameters,
    reason="this torch sorts the ranks of a group",
)
def test_ranks_in_the_order_of_the_mesh():
    run_ranks(2, check_rank_order)


def check_uneven_memberships() -> None:
    """Ranks of one ring that belong to different numbers of other groups."""
    dist.new_group([0, 2])
    mesh = DeviceMesh("cpu", [0, 1], mesh_dim_names=("cp",))
    if dist.get_rank() < 2:
        x = torch.randn(1, 2, 3, 8)
        ring_attention(x, x, x, mesh=mesh)


def test_members_of_other_groups():
    run_ranks(3, check_uneven_memberships)


def check_nothing_left() -> None:
    before = len(dist.distributed_c10d._world.pg_map)
    x = torch.randn(1, 2, 3, 8)
    for _ in range(3):
        group = dist.new_group([0, 1])
        ring_attention(x, x, x, mesh=DeviceMesh.from_group(group, "cpu", mesh_dim_names=("cp",)))
        dist.destroy_process_group(group)
        del group
    gc.collect()
    assert len(dist.distributed_c10d._world.pg_map) == before
    assert len(ops._buffers) <= 1


def test_a_destroyed_group_leaves_nothing_behind():
    run_ranks(2, check_nothing_left)


def check_after_a_failed_kernel() -> None:
    """All ranks fail alike, at each step, forward and backward; the next ring is exact."""
    mesh = init_device_mesh("cpu", (3,), mesh_dim_names=("cp",))
    kernel = KERNELS["cpu"]
    q, k, v, _ = random_inputs(1, (2, 1), 12, 8, torch.float64)
    local = [shard_sequence(x, mesh=mesh, dim=2).requires_grad_() for x in (q, k, v)]
    for name in ("attend", "attend_backward"):
        for step in range(3):
            calls = iter(range(100))
            original = getattr(kernel, name)

            def failing(*args, calls=calls, original=original, step=step):
                if next(calls) == step:
                    raise MemoryError
                return original(*args)

            setattr(kernel, name, failing)
            try:
                with pytest.raises(MemoryError):
                    ring_attention(*local, mesh=mesh).sum().backward()
            finally:
                delattr(kernel, name)
            out = unshard_sequence(ring_attention(*local, mesh=mesh), mesh=mesh, dim=2)
            check_close("out", out.detach(), reference_attention(q, k, v))


def test_a_kernel_that_fails_leaves_no_hop_under_way():
    run_ranks(3, check_after_a_failed_kernel, timeout=60)


def check_other_mesh() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("tp", "cp"))
    other = DeviceMesh("cpu", [[0, 2], [1, 3]], mesh_dim_names=("tp", "cp"))["cp"]
    x = distribute_tensor(torch.randn(1, 2, 8, 8), mesh, (Shard(1), Shard(2)))
    with pytest.raises(ValueError, match="axis 'cp' of the DTensors' mesh"):
        ring_attention(x, x, x, mesh=other)


def test_a_ring_of_other_ranks_than_the_dtensors_is_refused():
    run_ranks(4, check_other_mesh)
