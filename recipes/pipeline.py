"""One pass of a microbatch through a pipeline's schedule, for training and for validation."""

from collections.abc import Callable
from typing import Any

import torch

from recipes.batch import Microbatch, plain_loss


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
