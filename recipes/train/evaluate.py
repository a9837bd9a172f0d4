"""Evaluation by itself: the weights of a run loaded as its training would, and measured."""

from pathlib import Path

from recipes.checkpoint.files import finished_steps, load_without_code
from recipes.config.schema import StripedJobConfig
from recipes.train import spec as train_spec
from recipes.train.trainer import StripedTrainer


def evaluate(config: StripedJobConfig) -> None:
    """Load and measure; prints a table on the rank that logs, writes files on rank 0."""
    train_spec.register()
    load_without_code()
    trainer = StripedTrainer(config)
    try:
        step = step_to_load(config)
        loaded = trainer.checkpointer.load(step)
        assert loaded
        assert trainer.evaluation is not None
        trainer.evaluation.run(max(step, 0))
    finally:
        trainer.close()


def step_to_load(config: StripedJobConfig) -> int:
    """The step of the checkpoint to measure; -1: the weights that a run starts from."""
    if config.checkpoint.load_step != -1:
        return config.checkpoint.load_step
    folder = Path(config.job.dump_folder, config.checkpoint.folder)
    return max(finished_steps(folder), default=-1)
