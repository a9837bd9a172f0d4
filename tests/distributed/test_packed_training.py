"""Ten steps on packed documents from one seed checkpoint: cp 2 and 4 are cp 1."""

from unittest import mock

import pytest
import torch

from tests.helpers.launch import run_ranks
from tests.helpers.model_step import whole_gradients
from tests.helpers.training import trainer_of

STEPS = 10


def make_trainer(folder, degree, *more):
    arguments = [
        *("--job.config_file", "train_configs/debug_cpu_packed.toml", "--job.dump_folder", folder),
        *("--training.seq_len", "256", "--training.local_batch_size", "2", "--debug.seed", "3"),
        *("--training.steps", str(STEPS), "--metrics.log_freq", "1"),
        *("--metrics.no-enable-tensorboard", "--checkpoint.enable"),
        *("--parallelism.context_parallel_degree", str(degree), *more),
    ]
    return trainer_of(arguments)


def save_seed(folder):
    trainer = make_trainer(folder, 1, "--checkpoint.create_seed_checkpoint")
    trainer.checkpointer.save(curr_step=0, last_step=True)


def train(folder, degree):
    """Losses of all steps, and whether gradients are near those that cp 1 left in `folder`."""
    seed = ("--checkpoint.initial_load_path", f"{folder}/checkpoint/step-0")
    trainer = make_trainer(f"{folder}/cp{degree}", degree, *seed, "--checkpoint.load_only")
    losses, gradients = [], {}
    log = trainer.metrics_processor.log

    def keep_log(step, loss, *args, **kwargs):
        losses.append(loss)
        return log(step, loss, *args, **kwargs)

    def keep_gradients(*_):
        if trainer.step in (1, STEPS):
            for name, grad in whole_gradients(trainer.model_parts).items():
                gradients[trainer.step, name] = grad.clone()

    trainer.metrics_processor.log = keep_log
    trainer.optimizers.register_step_pre_hook(keep_gradients)
    with mock.patch("time.sleep"):
        trainer.train()
    trainer.close()
    if degree == 1:
        torch.save(gradients, f"{folder}/gradients.pt")
    expected = torch.load(f"{folder}/gradients.pt")
    errors = {
        step: max(
            ((grad - expected[key]).norm() / expected[key].norm()).item()
            for key, grad in gradients.items()
            if key[0] == step
        )
        for step in (1, STEPS)
    }
    return losses, errors


@pytest.mark.slow
def test_losses_and_gradients_do_not_depend_on_the_degree(tmp_path):
    folder = str(tmp_path)
    run_ranks(1, save_seed, folder)
    ((expected, _),) = run_ranks(1, train, folder, 1)
    assert len(expected) == STEPS
    assert expected[-1] < expected[0] - 0.5
    for degree in (2, 4):
        for losses, errors in run_ranks(degree, train, folder, degree, timeout=200):
            assert losses == pytest.approx(expected, rel=1e-5)
            # Later gradients are those of weights that rounding has moved apart.
            assert errors[1] < 1e-5
            assert errors[STEPS] < 1e-3
