"""When torchtitan's checkpointer (0.2.2) saves: what must hold before, and saving on request."""

import shutil
from pathlib import Path
from typing import NoReturn

import torch
from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.tools.logging import logger
from torchtitan.tools.utils import device_module

from recipes.checkpoint.files import METADATA
from recipes.process.preemption import Preempted


def forget_unfinished_start(checkpointer: CheckpointManager) -> None:
    """Remove what a run left that died in its first save; a collective of all ranks.

    torchtitan takes any checkpoint folder for a run under way: it would start from random weights
    instead of checkpoint.initial_load_path or Hugging Face's.
    """
    if not checkpointer.enable or checkpointer.load_only:
        return
    folder = Path(checkpointer.folder)
    if torch.distributed.get_rank() == 0 and folder.is_dir():
        unfinished = checkpointer._find_load_step() == -1
        for step in folder.glob("step-*") if unfinished else ():
            shutil.rmtree(step)
        if not any(folder.iterdir()):
            folder.rmdir()
    torch.distributed.barrier(device_ids=[device_module.current_device()])


def begin_overwriting(checkpointer: CheckpointManager, step: int) -> None:
    """Take the mark of a finished checkpoint off a folder that is about to be written again.

    Without that a rank that dies while a run that was set back (checkpoint.load_step) saves this
    step for the second time leaves a mixture of the two that looks finished.
    """
    if torch.distributed.get_rank() == 0:
        Path(checkpointer.folder, f"step-{step}", METADATA).unlink(missing_ok=True)


def save_and_leave(checkpointer: CheckpointManager, step: int, trained: bool) -> NoReturn:
    """Save step `step`, unless that has been done, and end the process; all ranks together.

    Args:
        trained: whether this process has made a step: otherwise there is nothing new to save.

    Raises:
        Preempted: always.
    """
    if not checkpointer.enable or checkpointer.load_only:
        message = f"asked to leave after step {step}: nothing is saved, checkpoints are off"
        logger.warning(message)
        raise Preempted(message)
    if trained and not checkpointer._should_save(step):
        begin_overwriting(checkpointer, step)
        checkpointer.interval = 1
        checkpointer.save(step)
    checkpointer._async_wait()
    message = (
        f"asked to leave: step {step} is saved in {checkpointer.folder}, the same command goes on "
        "from there"
    )
    logger.info(message)
    raise Preempted(message)
