"""One pass of a microbatch through a pipeline's schedule, for training and for validation.

Its loss is that of the last stage, which tells the others when it is logged: any rank may log
(`metrics.save_for_all_ranks`, LOG_RANK).
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from recipes.data.batch import Microbatch, plain_loss
from recipes.titan import ParallelDims


def pipeline_loss(
    run: Callable[..., Any], microbatch: Microbatch, *, has_first: bool, has_last: bool
) -> torch.Tensor:
    """Loss sum of the last stage; 0 on the ranks of other stages, which do not know it.

    Args:
        run: `step` or `eval` of the schedule.
        has_first, has_last: whether this rank has the first stage, the last stage.
    """
    tokens, labels, _, kwargs = microbatch
    losses: list[torch.Tensor] = []
    run(
        *((tokens,) if has_first else ()),
        **kwargs,
        labels=labels,
        target=labels if has_last else None,
        losses=losses if has_last else None,
        # They may be losses already, which torch would try to join along the batch.
        return_outputs=False,
    )
    if not has_last:
        return torch.zeros((), device=tokens.device)
    # torchtitan 0.2.2: pipelining with FSDP puts the losses on the CPU.
    return plain_loss(torch.stack(losses).sum().detach()).to(tokens.device)


def loss_of_last_stage(loss: torch.Tensor, parallel_dims: ParallelDims) -> torch.Tensor:
    """A sum of `pipeline_loss`es on every stage, in place; without a pipeline as it is."""
    mesh = parallel_dims.get_optional_mesh("pp")
    if mesh is not None:
        dist.all_reduce(loss, group=mesh.get_group())
    return loss
