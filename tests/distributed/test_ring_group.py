"""Hops go over a process group that nobody else uses, made once for a ring."""

from datetime import timedelta
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout

from striped_cp import ops, ring_attention
from striped_cp.ring import time_limit
from tests.distributed.launch import run_ranks


def groups_of_hops():
    """Name of the mesh's group, and the names of the groups that three calls use."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))
    used = []

    def post(operations):
        used.extend(operation.group.group_name for operation in operations)
        return dist_post(operations)

    dist_post = dist.batch_isend_irecv
    query = torch.randn(1, 2, 4, 8)
    with mock.patch.object(dist, "batch_isend_irecv", post):
        for _ in range(3):
            ring_attention(query, query, query, mesh=mesh)
    return mesh.get_group().group_name, used


def test_a_ring_has_its_own_group():
    for of_mesh, used in run_ranks(2, groups_of_hops):
        assert len(used) == 3 * 4
        assert len(set(used)) == 1
        assert of_mesh not in used


def limits_of_hops():
    """Time limits of the ring's group, before and after that of the mesh's group changed."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))
    query = torch.randn(1, 2, 4, 8)
    limits = []
    for seconds in (50, 20, 70):
        _set_pg_timeout(timedelta(seconds=seconds), mesh.get_group())
        ring_attention(query, query, query, mesh=mesh)
        (ring,) = ops._rings.values()
        limits.append(time_limit(ring.group, query.device).total_seconds())
    return limits


def test_its_time_limit_follows_the_meshs():
    assert run_ranks(2, limits_of_hops) == [[50, 20, 70]] * 2
