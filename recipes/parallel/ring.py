"""The ring that the settings name: its layout, the lengths that suit it, its process group."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from recipes.config.schema import StripedJobConfig
from striped_cp.layout import Layout, Striped, layout_from_spec

if TYPE_CHECKING:
    from datetime import timedelta

    from recipes.titan import ParallelDims


def named_layout(name: str, block_size: int) -> Layout:
    """The layout of `parallelism.context_parallel_load_balancer` and `striped_cp.block_size`."""
    return Striped(block_size) if name == Striped.name else layout_from_spec(name)


def layout_of(config: StripedJobConfig) -> Layout:
    """The layout that the settings name."""
    name = config.parallelism.context_parallel_load_balancer
    return named_layout(name, config.striped_cp.block_size)


def seq_len_divisor(config: StripedJobConfig) -> int:
    """What sequence lengths must be a multiple of."""
    parallelism = config.parallelism
    cp, tp = parallelism.context_parallel_degree, parallelism.tensor_parallel_degree
    return length_divisor(layout_of(config), cp, tp, config.striped_cp.ulysses_degree)


def length_divisor(layout: Layout, cp: int, tp: int, ulysses: int) -> int:
    """The layout's rule, and S/cp split over tp."""
    return math.lcm(layout.length_divisor(cp, ulysses), cp * tp)


def give_ring_its_groups(
    parallel_dims: ParallelDims, ulysses_degree: int, timeout: timedelta
) -> None:
    """Put the `cp` mesh on groups that nothing else uses; all ranks call it.

    Where context parallelism takes all ranks, torchtitan 0.2.2's meshes for `cp`, FSDP and the
    loss are the world's group: a hop of the ring would queue behind FSDP's collectives, and point
    to point next to a collective on one NCCL communicator can hang. With NCCL the groups' streams
    have high priority, or the few blocks that copy a hop wait until the attention kernel, which
    fills the GPU, is through.

    The mesh is replaced in torchtitan's own table, so that its time limits reach the new groups
    too. Where ranks share heads, it is the ring's axis and theirs.
    """
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

    from striped_cp.axes import ULYSSES

    mesh = parallel_dims.get_optional_mesh("cp")
    if mesh is None:
        return
    backend, options = dist.get_backend(mesh.get_group()), None
    if backend == "nccl":
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        options._timeout = timeout

    def group_of_mine(groups: list[list[int]], name: str) -> dist.ProcessGroup:
        group, _ = dist.new_subgroups_by_enumeration(
            groups, timeout, backend, options, group_desc=name
        )
        return group

    members: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(members, tuple(dist.get_process_group_ranks(mesh.get_group())))
    everyone = sorted(set(members))
    rings = [ranks[u::ulysses_degree] for ranks in everyone for u in range(ulysses_degree)]
    ring = group_of_mine(rings, "ring")
    if ulysses_degree == 1:
        mesh = DeviceMesh.from_group(ring, mesh.device_type, mesh_dim_names=("cp",))
    else:
        starts = range(0, len(everyone[0]), ulysses_degree)
        shared = [ranks[start:][:ulysses_degree] for ranks in everyone for start in starts]
        mesh = DeviceMesh.from_group(
            [ring, group_of_mine(shared, ULYSSES)],
            mesh.device_type,
            mesh=mesh.mesh.view(-1, ulysses_degree),
            mesh_dim_names=("cp", ULYSSES),
        )
        for axis in mesh.mesh_dim_names or ():
            parallel_dims._meshes[f"cp, axis {axis}"] = mesh[axis]
    parallel_dims._meshes["cp"] = mesh
