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
    """The ranks' x (n,) as rows: (P, n)."""
    if mesh is None:
        return x[None]
    rows = [torch.empty_like(x) for _ in range(mesh.size())]
    dist.all_gather(rows, x, group=mesh.get_group())
    return torch.stack(rows)


def _reduce(x: torch.Tensor, mesh: DeviceMesh | None, op: dist.ReduceOp.RedOpType) -> torch.Tensor:
    result = x.clone()
    if mesh is not None:
        dist.all_reduce(result, op, group=mesh.get_group())
    return result
