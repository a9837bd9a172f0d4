"""A process group for the ring alone."""

from datetime import timedelta

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torchtitan.distributed import ParallelDims


def give_ring_its_group(parallel_dims: ParallelDims, timeout: timedelta) -> None:
    """Put the `cp` mesh on a group that nothing else uses.

    Where context parallelism takes all ranks, torchtitan 0.2.2's meshes for `cp`, FSDP and the
    loss are the world's group: a hop of the ring would queue behind FSDP's collectives, and point
    to point next to a collective on one NCCL communicator can hang. The mesh is replaced in
    torchtitan's own table, so that its time limits reach the new group too. All ranks call it.
    """
    mesh = parallel_dims.get_optional_mesh("cp")
    if mesh is None or mesh.size() < dist.get_world_size():
        return  # no ring, or one whose group is smaller than the world's, and its own
    group = dist.new_group(timeout=timeout, group_desc="ring")
    parallel_dims._meshes["cp"] = DeviceMesh.from_group(
        group, mesh.device_type, mesh_dim_names=("cp",)
    )
