"""A run whose loss or gradients are no numbers any more ends before anything of it is saved."""

import math
from pathlib import Path

from torchtitan.components.checkpoint import CheckpointManager

from recipes.checkpoint.files import finished_steps
from recipes.process.faults import Stop


def check_finite(checkpointer: CheckpointManager, step: int, grad_norm: float) -> None:
    """Stop a run whose gradients are no numbers, before anything of it is saved.

    The norm is that of all parameters on every rank, so all ranks stop. A loss that is no number
    makes the norm one too, and weights that are none spoil every later step: it is enough to look
    where a step is logged or saved, and a checkpoint with finite gradients has finite weights.

    Raises:
        Stop: with the step and the last checkpoint.
    """
    if math.isfinite(grad_norm):
        return
    good = None
    if checkpointer.enable:
        folder = Path(checkpointer.folder)
        good = max(finished_steps(folder), default=None)
    checkpoint = "none" if good is None else folder / f"step-{good}"
    raise Stop(
        f"step {step}: loss or gradients are not finite (gradient norm {grad_norm}); last good "
        f"checkpoint: {checkpoint}, the same command goes on from it; look at loss and grad_norm "
        "of the steps before, at the documents of these steps, and at optimizer.lr, "
        "lr_scheduler.warmup_steps and training.mixed_precision_param"
    )
