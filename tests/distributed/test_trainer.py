"""Steps of the trainer on batches whose labels are partly or wholly to be ignored."""

import math
import os
import tempfile

import pytest
import torch
import torch.distributed as dist

from recipes.preflight import load_config
from recipes.train import spec as train_spec
from recipes.train.trainer import StripedTrainer
from tests.helpers.launch import run_ranks

SEQ_LEN = 48
IGNORE = -100


def make_trainer(folder: str, *settings: str) -> StripedTrainer:
    world_size = dist.get_world_size()
    config = load_config(
        [
            *("--job.config_file", "train_configs/debug_cpu.toml", "--job.dump_folder", folder),
            *("--training.seq_len", str(SEQ_LEN), "--training.local_batch_size", "2"),
            *("--parallelism.context_parallel_degree", str(world_size)),
            *("--debug.seed", "3", "--lr_scheduler.warmup_steps", "0", *settings),
        ],
        world_size,
    )
    os.environ["LOCAL_RANK"] = str(dist.get_rank())
    train_spec.register()
    return StripedTrainer(config)


def make_labels(ignored: str, tokens: torch.Tensor) -> torch.Tensor:
    """Targets of some tokens: all but those that the name says."""
    labels = tokens.roll(-1, dims=1)
    if ignored == "a third":
        labels[:, ::3] = labels[0, 5:9] = IGNORE
    elif ignored == "one rank":  # of two, with token stripes
        labels[:, 1::2] = IGNORE
    elif ignored == "second half":
        labels[:, SEQ_LEN // 2 :] = IGNORE
    elif ignored == "all":
        labels[:] = IGNORE
    return labels


def steps(ignored: list[str], *settings: str) -> dict[str, list]:
    """Train one step per entry; what was logged, and a fingerprint of the weights after each."""
    logged: dict[str, list] = {"loss": [], "largest": [], "norm": [], "tokens": [], "weights": []}
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(folder, *settings, "--metrics.log_freq", "1")

        def log(step: int, loss: float, largest: float, norm: float, extra_metrics: dict) -> None:
            logged["loss"].append(loss)
            logged["largest"].append(largest)
            logged["norm"].append(norm)
            logged["tokens"].append(extra_metrics["n_tokens_seen"])

        trainer.metrics_processor.log = log  # type: ignore[method-assign, assignment]
        dice = torch.Generator().manual_seed(1)
        loader = []
        for name in ignored:
            tokens = torch.randint(0, 2048, (2, SEQ_LEN), generator=dice)
            loader.append(({"input": tokens}, make_labels(name, tokens)))
        batches = trainer.batch_generator(loader)
        for _ in ignored:
            trainer.step += 1
            trainer.train_step(batches)
            weights = [p.detach() for m in trainer.model_parts for p in m.parameters()]
            shards = [w.to_local() if hasattr(w, "to_local") else w for w in weights]
            logged["weights"].append(sum(shard.double().sum().item() for shard in shards))
        trainer.close()
    return logged


@pytest.fixture(scope="module")
def alone() -> dict[str, list]:
    return run_ranks(1, steps, ["a third", "one rank", "second half", "none"])[0]


@pytest.mark.parametrize("world_size", [2, 4])
def test_ignored_labels_count_for_nothing(alone: dict[str, list], world_size: int) -> None:
    for rank in run_ranks(world_size, steps, ["a third", "one rank", "second half", "none"]):
        assert rank["loss"] == pytest.approx(alone["loss"], rel=1e-5)
        assert rank["norm"] == pytest.approx(alone["norm"], rel=1e-3)
        assert rank["tokens"] == [96, 192, 288, 384]
        for loss, largest in zip(rank["loss"], rank["largest"], strict=True):
            assert loss - 1e-4 <= largest < 1.2 * loss


def test_a_step_without_labels_changes_nothing() -> None:
    for rank in run_ranks(2, steps, ["none", "all", "none"]):
        assert rank["loss"][1] == 0.0
        assert all(math.isfinite(x) for x in (*rank["loss"], *rank["norm"], *rank["largest"]))
        assert rank["weights"][1] == rank["weights"][0]
        assert rank["weights"][2] != rank["weights"][1]


def test_gradients_of_replicas_are_added_as_those_of_shards_are() -> None:
    settings = ("--parallelism.context_parallel_degree", "1", "--training.local_batch_size", "1")
    replicate = (
        *("--parallelism.data_parallel_replicate_degree", "2"),
        *("--parallelism.data_parallel_shard_degree", "1"),
    )
    sharded = run_ranks(2, steps, ["a third", "none"], *settings)[0]
    replicated = run_ranks(2, steps, ["a third", "none"], *settings, *replicate)[0]
    assert replicated["norm"] == pytest.approx(sharded["norm"], rel=1e-4)
    assert replicated["loss"] == pytest.approx(sharded["loss"], rel=1e-5)


PIPELINE = (
    *("--parallelism.context_parallel_degree", "1"),
    *("--parallelism.pipeline_parallel_degree", "2"),
)


def test_every_stage_of_a_pipeline_logs_the_loss() -> None:
    first, last = run_ranks(2, steps, ["a third", "none"], *PIPELINE)
    for name in ("loss", "largest"):
        assert first[name] == last[name]
        assert all(7 < value < 9 for value in first[name])


def validation_loss(*settings: str) -> float:
    logged = []
    with tempfile.TemporaryDirectory() as folder:
        validation = ("--validation.enable", "--validation.steps", "1")
        trainer = make_trainer(folder, *settings, *validation)
        trainer.metrics_processor.log_validation = lambda loss, *_, **__: logged.append(loss)
        trainer.validator.validate(trainer.model_parts, 1)
        trainer.close()
    return logged[0]


def test_every_stage_of_a_pipeline_logs_the_validation_loss() -> None:
    first, last = run_ranks(2, validation_loss, *PIPELINE)
    assert first == last
    assert 7 < first < 9
