"""A run on a mixture: what it logs of its sources, and how it goes on at another degree."""

import json
from pathlib import Path

import pytest

from tests.helpers.runs import ROOT, train

LOSS = "loss_metrics/global_avg_loss"
SETTINGS = (
    *("--training.seq_len", "64", "--training.local_batch_size", "3", "--metrics.log_freq", "1"),
    *("--lr_scheduler.warmup_steps", "1", "--lr_scheduler.total_steps", "4", "--debug.seed", "3"),
    *("--checkpoint.enable", "--checkpoint.no-last-save-model-only"),
)
MIXTURE = """
[[training.mixture]]
dataset = "sample"
weight = 2

[[training.mixture]]
dataset = "local"
dataset_path = "{file}"

[[training.mixture]]
name = "pieces"
dataset = "sample"
seq_len = 16
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    lines = tmp_path / "lines.jsonl"
    texts = [f"Text {i}. " + "It is a truth. " * (i % 9) for i in range(300)]
    lines.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    debug = (ROOT / "train_configs/debug_cpu.toml").read_text()
    path = tmp_path / "mixture.toml"
    path.write_text(debug.replace('dataset = "sample"\n', "", 1) + MIXTURE.format(file=lines))
    return path


def test_stopped_and_resumed_at_another_context_parallel_degree(
    recipe: Path, tmp_path: Path
) -> None:
    def run(name: str, steps: int, cp: int):
        degrees = ("--parallelism.context_parallel_degree", str(cp))
        more = ("--training.steps", str(steps), "--parallelism.data_parallel_shard_degree", "2")
        config = ("--job.config_file", str(recipe))
        return train(2 * cp, tmp_path / name, *config, *SETTINGS, *degrees, *more)

    whole = run("whole", 4, 1)
    losses = run("parts", 2, 2).scalars[LOSS]
    resumed = run("parts", 4, 1)
    losses |= resumed.scalars[LOSS]
    assert losses == pytest.approx(whole.scalars[LOSS], rel=1e-4)
    for scalars in (whole.scalars, resumed.scalars):
        tokens = {name: scalars[f"data/{name}/tokens"][4] for name in ("sample", "lines", "pieces")}
        # 4 steps of 6 sequences, 3 on each rank.
        assert sum(tokens.values()) == pytest.approx(24 * 64, rel=0.01)
        assert tokens["sample"] == pytest.approx(12 * 64, abs=64)
        assert tokens["lines"] == pytest.approx(6 * 64, abs=64)
        assert scalars["data/lines/epoch"][4] == 0
    assert whole.scalars["data/padding(%)"][4] < 1
