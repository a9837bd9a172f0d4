"""Steps of the trainer on batches whose labels are partly or wholly to be ignored."""

import contextlib
import math
import random
import tempfile
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from recipes.train.trainer import StripedTrainer
from tests.helpers.documents import write_jsonl
from tests.helpers.launch import run_ranks
from tests.helpers.training import trainer_of

SEQ_LEN = 48
IGNORE = -100


@contextlib.contextmanager
def shared_folder() -> Iterator[str]:
    """One folder of all ranks, that of rank 0."""
    with tempfile.TemporaryDirectory() as own:
        names = [own]
        dist.broadcast_object_list(names)
        yield names[0]
        dist.barrier()


def make_trainer(folder: str, *settings: str) -> StripedTrainer:
    return trainer_of(
        [
            *("--job.config_file", "train_configs/debug_cpu.toml", "--job.dump_folder", folder),
            *("--training.seq_len", str(SEQ_LEN), "--training.local_batch_size", "2"),
            *("--parallelism.context_parallel_degree", str(dist.get_world_size())),
            *("--debug.seed", "3", "--lr_scheduler.warmup_steps", "0", *settings),
        ]
    )


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
    with shared_folder() as folder:
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


def validation_losses(steps: list[int], *settings: str) -> list[float]:
    """Rounds of validation of the same weights, each of so many steps."""
    logged = []
    with shared_folder() as folder:
        trainer = make_trainer(folder, *settings, "--validation.enable")
        trainer.metrics_processor.log_validation = lambda loss, *_, **__: logged.append(loss)
        trainer.checkpointer.load()
        for count in steps:
            trainer.job_config.validation.steps = count
            trainer.validator.validate(trainer.model_parts, 1)
        trainer.close()
    return logged


def save_weights(folder: str) -> None:
    seeding = ("--checkpoint.enable", "--checkpoint.create_seed_checkpoint")
    make_trainer(folder, *seeding).checkpointer.save(curr_step=0, last_step=True)


@pytest.fixture(scope="module")
def uneven(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """Weights, and five documents, some cut: neither they nor their sequences divide by ranks."""
    dice = random.Random(0)
    texts = ["".join(dice.choices("abcdefgh ", k=n)) for n in (50, 700, 150, 9, 300)]
    folder = tmp_path_factory.mktemp("uneven")
    path = write_jsonl(folder / "validation.jsonl", texts)
    run_ranks(1, save_weights, str(folder))
    return (
        *("--validation.dataset", "local", "--validation.dataset_path", str(path)),
        *("--checkpoint.enable", "--checkpoint.load_only", "--checkpoint.initial_load_model_only"),
        *("--checkpoint.initial_load_path", f"{folder}/checkpoint/step-0"),
    )


@pytest.fixture(scope="module")
def validated_alone(uneven: tuple[str, ...]) -> list[float]:
    """All data; more steps than there are sequences; six batches."""
    (losses,) = run_ranks(1, validation_losses, [-1, 99, 6], *uneven)
    assert losses[0] == losses[1]
    assert abs(losses[0] - losses[2]) > 1e-3
    return losses


CP1 = ("--parallelism.context_parallel_degree", "1")
CP2 = ("--parallelism.context_parallel_degree", "2")


@pytest.mark.parametrize(
    ("degree", "ranks", "settings"),
    [
        pytest.param(2, 2, CP1, id="dp2"),
        pytest.param(3, 3, CP1, id="dp3"),
        pytest.param(2, 4, CP2, id="cp2 dp2"),
        pytest.param(2, 4, PIPELINE, id="pp2 dp2"),
    ],
)
def test_validation_has_one_value_at_every_degree(
    uneven: tuple[str, ...],
    validated_alone: list[float],
    degree: int,
    ranks: int,
    settings: tuple[str, ...],
) -> None:
    steps = [-1, 99, 6 // degree]  # the same sequences: `degree` ranks share them
    for losses in run_ranks(ranks, validation_losses, steps, *settings, *uneven):
        assert losses == pytest.approx(validated_alone, abs=1e-5)


def test_every_stage_of_a_pipeline_logs_the_validation_loss() -> None:
    (first,), (last,) = run_ranks(2, validation_losses, [1], *PIPELINE)
    assert first == last
    assert 7 < first < 9
