"""The life of a training process: settings, trainer, end."""

import os
import signal
import sys
import time
from collections.abc import Sequence

import torch
from torchtitan.tools.logging import logger

from recipes.config import load_config
from recipes.console import init_console

# How long the other ranks wait for the launcher to stop them once rank 0 has said why.
_GRACE_SECONDS = 10


def main(args: Sequence[str]) -> None:
    """Train as the command line says, under torchrun; a wrong setting exits with status 2."""
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    try:
        config = load_config(args, world_size)
    except ValueError as error:
        refuse(str(error), rank)
    init_console(config, rank, world_size)
    # After the settings: these imports take seconds.
    from recipes.llama3 import train_spec
    from recipes.trainer import StripedTrainer

    train_spec.register()
    trainer: StripedTrainer | None = None
    try:
        trainer = StripedTrainer(config)
        if config.checkpoint.create_seed_checkpoint:
            trainer.checkpointer.save(curr_step=0, last_step=True)
            logger.info("Created seed checkpoint")
        else:
            trainer.train()
    finally:
        if trainer is not None:
            trainer.close()
    torch.distributed.destroy_process_group()


def refuse(message: str, rank: int) -> None:
    """Exit with status 2 on every rank, after one line from rank 0.

    torchrun stops the other ranks as soon as one has failed: they wait, so that it is not rank 0
    that is stopped before it could speak.
    """
    if rank == 0:
        print(message, file=sys.stderr, flush=True)
    else:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(2))
        time.sleep(_GRACE_SECONDS)
    sys.exit(2)
