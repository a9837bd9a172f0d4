"""Hops go over a process group that nobody else uses, made once for a ring."""

from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from striped_cp import ring_attention
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
