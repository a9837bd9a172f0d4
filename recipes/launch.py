"""The life of a training process: settings, trainer, end."""

import os
import sys
import traceback
from collections.abc import Sequence

from recipes.checkpoint.lock import hold_folder
from recipes.config.schema import StripedJobConfig
from recipes.preflight import load_config
from recipes.process import faults, signals
from recipes.process.quiet import quieten
from recipes.titan import logger


def main(args: Sequence[str]) -> None:
    """Train as the command line says, under torchrun.

    Exit status 2: a wrong setting or a bad file; 75: asked to leave, a checkpoint is saved; 1: any
    other failure. With `--debug` a traceback comes with every message.
    """
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    debug = "--debug" in args
    if "RANK" not in os.environ and not {"--help", "-h"} & set(args):
        refuse("train.py: start it with torchrun --nproc_per_node N train.py ...", rank)
    notes: list[str] = []
    try:
        config = load_config([arg for arg in args if arg != "--debug"], world_size, notes)
        if rank == 0 and config.checkpoint.enable and not config.checkpoint.load_only:
            hold_folder(config)
    except ValueError as error:
        if debug and rank == 0:
            traceback.print_exception(error)
        refuse(str(error), rank)
    quieten(config, rank, world_size)
    for note in notes:
        logger.info(note)
    # After the settings: these imports take seconds.
    import torch.distributed as dist
    from torch.distributed.checkpoint import CheckpointException

    try:
        _train(config)
    except signals.Preempted as stop:
        dist.destroy_process_group()
        faults.end(stop.message, signals.EXIT_STATUS)
    except (Exception, CheckpointException) as error:
        faults.leave(error, rank, debug)
    dist.destroy_process_group()


def _train(config: StripedJobConfig) -> None:
    from recipes.titan.patches import load_without_code
    from recipes.train import spec as train_spec
    from recipes.train.trainer import StripedTrainer

    train_spec.register()
    load_without_code()
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


def refuse(message: str, rank: int) -> None:
    """Exit with status 2, after one line from rank 0.

    torchrun stops the other ranks as soon as one has failed: they wait, so that it is not rank 0
    that is stopped before it could speak.
    """
    message = " ".join(message.split())  # what it quotes of a file may have several lines
    faults.record(message)
    faults.do_not_restart(2)
    if rank == 0:
        print(message, file=sys.stderr, flush=True)
    else:
        faults.wait_for_launcher()
    sys.exit(2)
