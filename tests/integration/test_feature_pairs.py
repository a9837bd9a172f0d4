"""Every pair of features in a run that saves, is asked to leave, and goes on as if it never had."""

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recipes.preflight import load_config
from recipes.process.signals import EXIT_STATUS
from tests.helpers.faults import Disturbed
from tests.helpers.hf_models import make_model, save_model
from tests.helpers.runs import RECIPE, ROOT
from tests.integration import features
from tests.integration.features import FEATURES, RANKS, REFUSED, Row

STEPS, LEAVE_STEP = 6, 3
BASE = (
    *("--training.seq_len", "160", "--training.local_batch_size", "2"),
    *("--training.steps", str(STEPS), "--lr_scheduler.warmup_steps", "2", "--debug.seed", "7"),
    *("--metrics.log_freq", "1", "--checkpoint.enable", "--checkpoint.interval", "2"),
)
MIXTURE = """
[[training.mixture]]
dataset = "local"
dataset_path = "{jsonl}"
weight = 2

[[training.mixture]]
dataset = "local"
dataset_path = "{prepared}"
seq_len = 100
when_used_up = "stop"
"""
ROWS = features.covering_rows()
# A sample for the suite that runs always; what compiles takes minutes.
SAMPLE = [
    next(i for i, row in enumerate(ROWS) if row["ranks"] == ranks and row["compile"] == "off")
    for ranks in ("1", "cp2")
]


def test_the_rows_have_every_pair() -> None:
    covered = set().union(*map(features.pairs_of, ROWS))
    assert covered.isdisjoint(REFUSED)
    assert covered | REFUSED == set(features.every_pair())


@pytest.mark.parametrize("pair", sorted(map(sorted, REFUSED)), ids=str)
def test_a_refused_pair_is_refused_at_startup(pair: list[tuple[str, str]]) -> None:
    row = {name: next(iter(values)) for name, values in FEATURES.items()} | dict(pair)
    if "checkpointing" not in dict(pair):
        row["checkpointing"] = "full"
    ranks, _ = RANKS[row["ranks"]]
    settings = ["--job.config_file", "train_configs/debug_cpu.toml", *BASE]
    with pytest.raises(ValueError, match="; allowed: ") as error:
        load_config([*settings, *features.settings_of(row)], ranks)
    assert "\n" not in str(error.value)


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What the settings of some features name."""
    from recipes.data.prepare import Settings, prepare

    folder = tmp_path_factory.mktemp("features")
    for model, settings in FEATURES["model"].items():
        weights = make_model("none", name=settings[1], tied="tied" in model)
        save_model(folder / f"hf {model}", weights)
    jsonl = folder / "texts.jsonl"
    texts = [
        f"Text {i}. " + "It is a truth universally acknowledged. " * (i % 9) for i in range(200)
    ]
    jsonl.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    how = Settings([jsonl], "text", "assets/tokenizer", 10_000, skip_bad=False)
    prepare(how, folder / "prepared", 1, lambda _: None)
    dice = np.random.default_rng(0)
    ids = [dice.integers(2, 2048, n).tolist() for n in dice.integers(2, 300, 200)]
    masks = [dice.integers(0, 2, len(i)).tolist() for i in ids]
    pq.write_table(pa.table({"input_ids": ids, "loss_mask": masks}), folder / "ids.parquet")
    chats = folder / "chats.jsonl"
    roles = ("user", "assistant")
    chats.write_text(
        "".join(
            json.dumps(
                {"messages": [{"role": role, "content": text} for role in roles * (1 + i % 3)]}
            )
            + "\n"
            for i, text in enumerate(texts)
        )
    )
    paths = {"jsonl": jsonl, "prepared": folder / "prepared", "ids": folder / "ids.parquet"}
    made = {"folder": str(folder), "chats": str(chats), **{k: str(p) for k, p in paths.items()}}
    recipe = folder / "mixture.toml"
    recipe.write_text((ROOT / RECIPE).read_text().replace('dataset = "sample"\n', "", 1) + MIXTURE)
    recipe.write_text(recipe.read_text().format(**made))
    return {**made, "mixture": str(recipe)}


def run(row: Row, folder: Path, files: dict[str, str], leave: bool = False) -> Disturbed:
    """One start of the row's command, to its end."""
    ranks, _ = RANKS[row["ranks"]]
    hf = f"{files['folder']}/hf {row['model']}"
    settings = [word.format(**files, hf=hf) for word in features.settings_of(row)]
    started = Disturbed(
        ranks,
        *("--job.dump_folder", str(folder), *BASE, *settings),
        script="tests/helpers/stopping_train.py" if leave else "train.py",
        LEAVE_STEP=str(LEAVE_STEP),
        LEAVE_RANK=str(ranks - 1),
    )
    status = started.wait(600)
    assert (status == 0) != leave, started.output
    return started


@pytest.mark.timeout(2400)
@pytest.mark.parametrize(
    "number",
    [pytest.param(i, marks=() if i in SAMPLE else pytest.mark.slow) for i in range(len(ROWS))],
)
def test_a_run_goes_on_as_if_never_stopped(
    number: int, files: dict[str, str], tmp_path: Path
) -> None:
    row = ROWS[number]
    whole = run(row, tmp_path / "whole", files)
    assert sorted(whole.losses) == list(range(1, STEPS + 1)), (row, whole.output)
    stopped = run(row, tmp_path / "parts", files, leave=True)
    assert f"exitcode  : {EXIT_STATUS}" in stopped.output
    assert sorted(stopped.losses) == list(range(1, LEAVE_STEP + 1)), (row, stopped.output)
    resumed = run(row, tmp_path / "parts", files)
    assert sorted(resumed.losses) == list(range(LEAVE_STEP + 1, STEPS + 1)), (row, resumed.output)
    assert {**stopped.losses, **resumed.losses} == pytest.approx(whole.losses, abs=2e-5), row
