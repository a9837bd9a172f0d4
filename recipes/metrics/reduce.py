"""Small tensors across the ranks of a mesh; None is a mesh of one rank."""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh


def sum_over(x: torch.Tensor, mesh: DeviceMesh | None) -> torch.Tensor:
    """Sum of the ranks' x; x itself stays as it is."""
    return _reduce(x, mesh, dist.ReduceOp.SUM)


def max_over(x: torch.Tensor, mesh: DeviceMesh | None) -> torch.Tensor:
    """Largest of the ranks' x, element by element."""
    return _reduce(x, mesh, dist.ReduceOp.MAX)


def gather_over(x: torch.Tensor, mesh: DeviceMesh | None) -> torch.Tensor:
    """The ranks' x (n,) as rows: (P, n); P are those of all axes of the mesh."""
    rows = x[None]
    if mesh is None:
        return rows
    for dim in range(mesh.ndim):
        parts = [torch.empty_like(rows) for _ in range(mesh.size(dim))]
        dist.all_gather(parts, rows, group=mesh.get_group(dim))
        rows = torch.cat(parts)
    return rows


def _reduce(x: torch.Tensor, mesh: DeviceMesh | None, op: dist.ReduceOp.RedOpType) -> torch.Tensor:
    result = x.clone()
    if mesh is not None:
        dist.all_reduce(result, op, group=mesh.get_group())
    return result
