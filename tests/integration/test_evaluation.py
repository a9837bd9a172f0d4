"""scripts/evaluate.py on one process and on several, evaluation in training, a task learned."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from recipes.data.tokens import Tokenizer
from recipes.evaluation.haystack import Encoder
from recipes.evaluation.tasks import copy_words
from tests.helpers.hf_models import make_model, save_model
from tests.helpers.models import name_settings
from tests.helpers.runs import RECIPE, ROOT, TINY, train

SMALL = (
    *("--evaluation.lengths", "300", "330", "--evaluation.depths", "0", "1"),
    *("--evaluation.samples", "1", "--evaluation.texts", "3", "--evaluation.short_context", "64"),
)


def evaluate(
    ranks: int, folder: Path, *settings: str
) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    """The finished process, and the newest result of that folder."""
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks))
    command = [
        *(sys.executable, *(launcher if ranks > 1 else ()), "scripts/evaluate.py"),
        *("--job.config_file", RECIPE, "--job.dump_folder", str(folder), *TINY, *settings),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=250
    )
    results = sorted(folder.glob("evaluation/*.json"), key=lambda file: file.stat().st_mtime)
    return done, json.loads(results[-1].read_text()) if results else {}


def numbers(value: Any) -> list[float]:
    """All numbers of a result, in order; None as not a number."""
    if isinstance(value, dict):
        return [x for v in value.values() for x in numbers(v)]
    if isinstance(value, list):
        return [x for v in value for x in numbers(v)]
    return [] if isinstance(value, str) else [float("nan") if value is None else float(value)]


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("weights")
    return save_model(folder, make_model("llama3"))


@pytest.fixture(scope="module")
def alone(weights: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("alone")
    done, result = evaluate(1, folder, *settings_of(weights, cp=1))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "accuracy by length" in done.stdout + done.stderr
    return folder, result


def settings_of(weights: Path, cp: int) -> tuple[str, ...]:
    return (
        *("--initial", "--checkpoint.initial_load_in_hf", "--model.hf_assets_path", str(weights)),
        *("--rope.on_mismatch", "take", "--parallelism.context_parallel_degree", str(cp), *SMALL),
    )


def test_every_measure_is_there(alone: tuple[Path, dict[str, Any]]) -> None:
    folder, result = alone
    assert result["step"] == 0
    assert set(result["tasks"]) == {"passkey", "needle", "multikey", "multivalue", "copy"}
    assert [(c["length"], c["depth"]) for c in result["tasks"]["needle"]] == [
        *((300, 0.0), (300, 1.0), (330, 0.0), (330, 1.0)),
    ]
    text = result["text"]
    assert (text["length"], text["sequences"], text["short_context"]) == (330, 3, 64)
    assert text["gain"] is not None
    assert [b["first"] for b in text["positions"]] == [1, 32, 64, 128, 256]
    assert (folder / "evaluation" / "step-0.png").stat().st_size > 1000
    events = EventAccumulator(str(folder / "evaluation")).Reload()
    assert events.Tags()["images"] == ["evaluation/accuracy"]
    scalars = events.Tags()["scalars"]
    assert "evaluation/needle/accuracy/330" in scalars
    assert events.Scalars("evaluation/text/loss")[0].value == pytest.approx(text["loss"])


@pytest.mark.parametrize(
    ("ranks", "cp"), [(2, 2), pytest.param(2, 1, marks=pytest.mark.slow)], ids=["cp2", "dp2"]
)
def test_any_number_of_ranks_measures_the_same(
    alone: tuple[Path, dict[str, Any]], weights: Path, tmp_path: Path, ranks: int, cp: int
) -> None:
    done, result = evaluate(ranks, tmp_path, *settings_of(weights, cp))
    assert done.returncode == 0, done.stdout + done.stderr
    expected = numbers(alone[1])
    assert len(expected) > 100
    np.testing.assert_allclose(numbers(result), expected, rtol=1e-5, atol=1e-5)


def test_other_weights_are_measured_beside_the_first(
    alone: tuple[Path, dict[str, Any]], weights: Path, tmp_path: Path
) -> None:
    folder, first = alone
    name = "qwen3_striped"
    other = save_model(tmp_path, make_model("llama3", name=name, tied=True))
    few = ("--evaluation.tasks", "passkey", "--evaluation.texts", "0")
    settings = (*settings_of(other, cp=1), *name_settings(name, tied=True))
    done, second = evaluate(1, folder, *settings, *few)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (first["weights"], second["weights"]) == (str(weights), str(other))
    assert json.loads((folder / "evaluation" / "step-0.json").read_text()) == first
    for name in ("step-0-2.json", "step-0-2.png"):
        assert (folder / "evaluation" / name).is_file()


def test_without_weights_there_is_nothing_to_measure(tmp_path: Path) -> None:
    done, _ = evaluate(1, tmp_path, "--parallelism.context_parallel_degree", "1", *SMALL)
    assert done.returncode == 2
    assert "no checkpoint; train first, or load weights with" in done.stderr.splitlines()[-1]


def test_training_measures_every_so_many_steps(tmp_path: Path) -> None:
    settings = ("--evaluation.enable", "--evaluation.freq", "2", "--evaluation.tasks", "copy")
    run = train(2, tmp_path, *TINY, *SMALL, *settings, "--training.steps", "3")
    accuracy = run.scalars["evaluation/copy/accuracy/330"]
    assert sorted(accuracy) == [2, 3]  # and the last one
    assert sorted(run.scalars["loss_metrics/global_avg_loss"]) == [1, 2, 3]
    assert len(re.findall(r"evaluation of step \d in ", run.output)) == 2
    results = [tmp_path / "evaluation" / f"step-{step}.json" for step in (2, 3)]
    told = [json.loads(file.read_text())["weights"] for file in results]
    assert told == [f"step {step} of {tmp_path}" for step in (2, 3)]
    # An evaluation is no part of a step's time.
    seconds = run.scalars["time_metrics/end_to_end(s)"]
    (taken,) = re.findall(r"evaluation of step 2 in ([\d.]+) s", run.output)
    assert seconds[3] < float(taken)


def copy_documents(path: Path, seq_len: int, count: int) -> None:
    """Documents of words and the same words again, as long as a sequence or a little less."""
    encode = Encoder(Tokenizer("assets/tokenizer"))
    dice = np.random.default_rng(1)
    with path.open("w") as file:
        for _ in range(count):
            part = ""
            for word in copy_words(dice, seq_len).split():
                if len(encode(f"{part} {word}")) > (seq_len - 2) // 2:
                    break
                part += f" {word}"
            file.write(json.dumps({"text": part + part}) + "\n")


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_model_that_learns_to_copy_shows_it(tmp_path: Path) -> None:
    """Nothing at the beginning, nearly all right at the end: in training, and measured after it."""
    seq_len = 64
    copy_documents(tmp_path / "copy.jsonl", seq_len, count=3000)
    cp1 = ("--parallelism.context_parallel_degree", "1")
    settings = (
        *("--training.seq_len", str(seq_len), "--evaluation.tasks", "copy", *cp1),
        *("--evaluation.lengths", str(seq_len), "--evaluation.samples", "4"),
        *("--evaluation.texts", "1", "--evaluation.short_context", "16"),
        *("--training.dataset", "local", "--training.dataset_path", str(tmp_path / "copy.jsonl")),
    )
    run = train(
        *(1, tmp_path, *TINY, *settings, "--training.local_batch_size", "32"),
        *("--training.steps", "350", "--optimizer.lr", "3e-3", "--lr_scheduler.warmup_steps", "20"),
        *("--checkpoint.enable", "--checkpoint.interval", "350"),
        "--checkpoint.last_save_model_only",
        *("--evaluation.enable", "--evaluation.freq", "50", "--metrics.log_freq", "50"),
        timeout=900,
    )
    accuracy = run.scalars[f"evaluation/copy/accuracy/{seq_len}"]
    assert sorted(accuracy) == list(range(50, 351, 50))
    assert accuracy[50] < 0.6
    assert accuracy[350] > 0.9
    lines = re.findall(r"copy +accuracy by length +64: +([\d.]+)%", run.output)
    assert len(lines) == 7

    done, result = evaluate(2, tmp_path, *settings, "--parallelism.context_parallel_degree", "2")
    assert done.returncode == 0, done.stdout + done.stderr
    assert result["step"] == 350
    # 0.9999 of a token may be rounded otherwise on two ranks.
    assert result["tasks"]["copy"][0]["accuracy"] == pytest.approx(accuracy[350], abs=0.01)
