"""What runs here: one line at the top of a run's log."""

import os

import torch
import torch.distributed as dist

from recipes.config.schema import StripedJobConfig
from recipes.preflight.host import kernel_of, uses_ring
from recipes.titan import ParallelDims


def versions(config: StripedJobConfig, parallel_dims: ParallelDims) -> str:
    """One line: versions, mesh, kernel."""
    nccl = "no NCCL"
    if dist.is_nccl_available() and torch.cuda.is_available():
        nccl = "NCCL " + ".".join(map(str, torch.cuda.nccl.version()))
    degrees = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
    mesh = ", ".join(f"{name} {getattr(parallel_dims, name)}" for name in degrees)
    nodes = parallel_dims.world_size // int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    kernel = kernel_of(config) if uses_ring(config) else "torch's own attention"
    return (
        f"torch {torch.__version__}, {nccl}, backend {dist.get_backend()}; "
        f"{parallel_dims.world_size} ranks on {nodes} nodes, mesh {mesh}; kernel {kernel}"
    )
