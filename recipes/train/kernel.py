"""The attention kernel of a run: the fastest that is right on the GPUs it runs on."""

import math

import torch.distributed as dist

from recipes.config.schema import StripedJobConfig
from recipes.models.registry import shape_of
from recipes.preflight.host import kernel_request, uses_ring
from recipes.titan import ParallelDims, logger
from striped_cp import Selection, select_kernel


def select_run_kernel(config: StripedJobConfig, parallel_dims: ParallelDims) -> Selection | None:
    """Check the kernels, time them if `striped_cp.kernel` is "auto", and name the one to take in
    `config`; a collective of all ranks. None: attention is torch's own.

    Raises:
        ValueError: none computes the right numbers; on every rank.
    """
    if not uses_ring(config):
        return None
    shape = shape_of(config)
    degree = config.striped_cp.ulysses_degree
    kv_heads = shape.n_kv_heads // parallel_dims.tp
    selection = select_kernel(
        config.striped_cp.kernel,
        kernel_request(config),
        heads=shape.n_heads // parallel_dims.tp // degree,
        kv_heads=math.lcm(kv_heads, degree) // degree,  # copied where there are fewer than ranks
        rows=config.training.seq_len // parallel_dims.cp * degree,
        windowed=shape.windowed,
        group=dist.group.WORLD,
    )
    logger.info(f"kernel: {selection}")
    config.striped_cp.kernel = selection.kernel  # type: ignore[assignment]
    return selection
