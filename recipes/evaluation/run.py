"""Evaluation by itself: the weights of a run loaded as its training would, and measured."""

from pathlib import Path

from recipes.checkpoint_files import load_without_code
from recipes.config import StripedJobConfig
from recipes.llama3 import train_spec
from recipes.trainer import StripedTrainer


def evaluate(config: StripedJobConfig) -> None:
    """Load and measure; prints a table on the rank that logs, writes files on rank 0."""
    train_spec.register()
    load_without_code()
    trainer = StripedTrainer(config)
    try:
        loaded = trainer.checkpointer.load(step=config.checkpoint.load_step)
        assert loaded
        assert trainer.gate is not None
        trainer.gate.run(loaded_step(config))
    finally:
        trainer.close()


def loaded_step(config: StripedJobConfig) -> int:
    """The step of the weights; 0 for those a run starts from."""
    folder = Path(config.job.dump_folder, config.checkpoint.folder)
    if config.checkpoint.load_step != -1:
        return config.checkpoint.load_step
    names = (path.name.removeprefix("step-") for path in folder.glob("step-*"))
    return max((int(name) for name in names if name.isdigit()), default=0)
