"""A run interrupted twice, at changing context-parallel degrees, is the run that was not."""

import shutil
from unittest import mock

import pytest
import torch

from recipes.preflight import load_config
from tests.helpers.documents import fingerprint, number_documents, write_jsonl
from tests.helpers.launch import run_ranks
from tests.helpers.training import trainer_of

STEPS = 6


def settings(folder, data, steps, degree, *more):
    return [
        *("--job.config_file", "train_configs/debug_cpu.toml", "--job.dump_folder", folder),
        *("--training.dataset", "local", "--training.dataset_path", data),
        *("--training.seq_len", "64", "--training.local_batch_size", "1"),
        *("--training.steps", str(steps), "--debug.seed", "3", "--metrics.log_freq", "1"),
        *("--lr_scheduler.total_steps", str(STEPS), "--lr_scheduler.warmup_steps", "1"),
        *("--parallelism.context_parallel_degree", str(degree)),
        *("--checkpoint.enable", "--checkpoint.interval", "1000"),
        *("--checkpoint.no-last-save-model-only", "--metrics.no-enable-tensorboard", *more),
    ]


def train(*args):
    """Losses and sequences by step, of the steps that this run made itself."""
    trainer = trainer_of(settings(*args))
    losses, batches = {}, {}
    log = trainer.metrics_processor.log
    load = trainer.batch_generator

    def keep_log(step, loss, *args, **kwargs):
        losses[step] = loss
        return log(step, loss, *args, **kwargs)

    def keep_batches(iterable):
        for batch in load(iterable):
            batches[trainer.step] = fingerprint(batch)
            yield batch

    trainer.metrics_processor.log = keep_log
    trainer.batch_generator = keep_batches
    with mock.patch("time.sleep"):
        trainer.train()
    trainer.close()
    return losses, batches


@pytest.fixture
def data(tmp_path):
    """Five short documents: the steps of a run go round them more than once."""
    lengths = [9, 30, 15, 42, 5]
    folder = tmp_path / "data"
    folder.mkdir()
    write_jsonl(folder / "a.jsonl", number_documents(lengths))
    return str(folder)


def test_resumed_twice_with_other_context_parallel_degrees(data, tmp_path):
    whole = run_ranks(2, train, str(tmp_path / "whole"), data, STEPS, 2)[0]
    assert sorted(whole[0]) == list(range(1, STEPS + 1))
    folder = str(tmp_path / "parts")
    losses, batches = {}, {}
    for degree, steps in ((2, 2), (1, 4), (2, STEPS)):
        for rank_losses, rank_batches in run_ranks(degree, train, folder, data, steps, degree):
            if rank_losses:
                losses |= rank_losses
            assert all(batches.get(step, h) == h for step, h in rank_batches.items())
            batches |= rank_batches
    assert batches == whole[1]
    assert len(set(batches.values())) == STEPS
    assert losses == pytest.approx(whole[0], rel=1e-4)


def test_resumed_with_longer_sequences(data, tmp_path):
    """The steps after it are the same ones at every context-parallel degree."""
    short = tmp_path / "short"
    run_ranks(2, train, str(short), data, 2, 2)
    runs = []
    for degree in (1, 2):
        folder = tmp_path / f"cp{degree}"
        shutil.copytree(short, folder)
        more = (str(folder), data, 4, degree, "--training.seq_len", "128")
        runs.append(run_ranks(degree, train, *more)[0])
    (losses, batches), (losses_of_two, batches_of_two) = runs
    assert sorted(losses) == [3, 4]
    assert losses_of_two == pytest.approx(losses, rel=1e-4)
    assert batches_of_two == batches


def train_and_tell(*args):
    """Learning rates by step, and the optimizer's settings at the end."""
    trainer = trainer_of(settings(*args))
    rates = {}
    step = trainer.optimizers.step

    def keep_rate():
        ((group,),) = (optimizer.param_groups for optimizer in trainer.optimizers)
        rates[trainer.step] = group["lr"]
        step()

    trainer.optimizers.step = keep_rate
    with mock.patch("time.sleep"), mock.patch("recipes.checkpoint.resume.logger.info") as told:
        trainer.train()
    trainer.close()
    (group,) = next(iter(trainer.optimizers)).param_groups
    names = ("betas", "eps", "weight_decay", "decoupled_weight_decay")
    lines = [call.args[0] for call in told.call_args_list]
    return rates, [group[name] for name in names], [x for x in lines if x.startswith("Goes on")]


def test_settings_of_the_optimizer_hold_after_a_resume(data, tmp_path):
    edited = (
        *("--optimizer.lr", "1e-3", "--optimizer.beta2", "0.5", "--optimizer.eps", "1e-4"),
        *("--optimizer.weight_decay", "0.25", "--optimizer.name", "Adam"),
    )
    folder, whole = str(tmp_path / "parts"), str(tmp_path / "whole")
    ((wanted, values, _),) = run_ranks(1, train_and_tell, whole, data, 4, 1, *edited)
    assert values == [(0.9, 0.5), 1e-4, 0.25, False]
    ((_, _, told),) = run_ranks(1, train_and_tell, folder, data, 2, 1)
    assert told == []
    ((rates, again, told),) = run_ranks(1, train_and_tell, folder, data, 4, 1, *edited)
    assert rates == {step: wanted[step] for step in (3, 4)}
    assert again == values
    (line,) = told
    assert "optimizer.lr = 0.001, was 0.004; " in line
    assert "optimizer.weight_decay = 0.25, was 0.1; " in line


def test_a_schedule_that_is_made_longer_holds_from_the_first_step_on(data, tmp_path):
    longer = ("--lr_scheduler.total_steps", "9", "--lr_scheduler.decay_ratio", "1.0")
    folder, whole = str(tmp_path / "parts"), str(tmp_path / "whole")
    ((wanted, _, _),) = run_ranks(1, train_and_tell, whole, data, 4, 1, *longer)
    run_ranks(1, train_and_tell, folder, data, 2, 1)
    ((rates, _, told),) = run_ranks(1, train_and_tell, folder, data, 4, 1, *longer)
    assert rates == {step: wanted[step] for step in (3, 4)}
    (line,) = told
    assert line.endswith("of the checkpoint: training.steps = 4, was 2")


def test_another_data_parallel_degree_is_refused_before_the_run(data, tmp_path):
    folder = str(tmp_path / "run")
    run_ranks(1, train, folder, data, 2, 1)
    with pytest.raises(ValueError, match=r"step-2: .* data-parallel degree 1, this run has 2: "):
        load_config(settings(folder, data, 4, 1), world_size=2)
    # The way on that the message names.
    excluded = ("--checkpoint.exclude_from_loading", "dataloader")
    load_config(settings(folder, data, 4, 1, *excluded), world_size=2)
    assert torch.distributed.is_initialized() is False
