"""A run that goes on from a checkpoint does so with the settings of its TOML.

torchtitan 0.2.2 restores the optimizer's settings along with its moments, so that after an edit of
the TOML the old learning rate, betas, eps and weight decay would stay, silently.
"""

from torchtitan.components.lr_scheduler import LRSchedulersContainer
from torchtitan.components.optimizer import OptimizersContainer

from recipes.titan import logger

# By the optimizer's name for it. "Adam" and "AdamW" differ in one setting (torch 2.13).
_KEYS = {
    "initial_lr": "optimizer.lr",
    "betas": "optimizer.beta1 and beta2",
    "eps": "optimizer.eps",
    "weight_decay": "optimizer.weight_decay",
    "decoupled_weight_decay": "optimizer.name (AdamW's weight decay)",
}


def hold_to_settings(
    optimizers: OptimizersContainer,
    schedulers: LRSchedulersContainer,
    steps: int,
    steps_before: int,
) -> None:
    """Give the optimizers the settings they were made with, at the schedule's present step.

    One line in the log says what differs from the checkpoint.

    Args:
        steps: training.steps.
        steps_before: that of the run that wrote the checkpoint.
    """
    changes: dict[str, str] = {}
    if steps != steps_before:
        changes["training.steps"] = f"training.steps = {steps}, was {steps_before}"
    for optimizer, scheduler in zip(optimizers, schedulers, strict=True):
        settings = {**optimizer.defaults, "initial_lr": optimizer.defaults["lr"]}
        scheduler.base_lrs = [settings["lr"]] * len(optimizer.param_groups)
        scheduler._last_lr = [
            base * factor(scheduler.last_epoch)
            for base, factor in zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True)
        ]
        for group, rate in zip(optimizer.param_groups, scheduler.get_last_lr(), strict=True):
            for name, key in _KEYS.items():
                before, now = _plain(group.get(name)), _plain(settings.get(name))
                if before != now:
                    changes[key] = f"{key} = {now}, was {before}"
            group.update(settings)
            group["lr"] = rate
    if changes:
        told = "; ".join(changes.values())
        logger.info(f"Goes on with other settings than those of the checkpoint: {told}")


def _plain(value: object) -> object:
    """Loaded numbers may be tensors, loaded tuples lists."""
    if isinstance(value, (list, tuple)):
        return tuple(_plain(x) for x in value)
    return value.item() if hasattr(value, "item") else value
