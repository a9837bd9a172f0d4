"""Evaluation by itself: the weights of a run loaded as its training would, and measured."""

from recipes.checkpoint.files import checkpoint_to_load, step_to_load
from recipes.config.schema import StripedJobConfig
from recipes.preflight.weights import weights_folder
from recipes.titan.patches import load_without_code
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
        weights = None
        if step == -1:
            found = checkpoint_to_load(config)
            weights = weights_folder(config) if found is None else found.folder
        trainer.evaluation.run(max(step, 0), weights)
    finally:
        trainer.close()
