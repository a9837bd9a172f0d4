"""Validation over all data has one value, whatever part of it each rank reads."""

import json
import os
import random
from pathlib import Path
from unittest import mock

import pytest
import torch.distributed as dist

from recipes.preflight import load_config
from recipes.train import spec
from recipes.train.trainer import StripedTrainer
from tests.helpers.launch import run_ranks

SETTINGS = (
    *("--job.config_file", "train_configs/debug_cpu.toml", "--debug.seed", "3"),
    *("--training.seq_len", "240", "--training.local_batch_size", "2"),
    *("--lr_scheduler.warmup_steps", "1", "--metrics.no-enable-tensorboard"),
    *("--validation.enable", "--validation.steps", "-1", "--validation.dataset", "local"),
)


def validate(folder: str, *settings: str) -> float:
    os.environ["LOCAL_RANK"] = "0"
    spec.register()
    paths = ("--job.dump_folder", folder, "--validation.dataset_path", f"{folder}/data.jsonl")
    trainer = StripedTrainer(load_config([*SETTINGS, *paths, *settings], dist.get_world_size()))
    with mock.patch.object(trainer.metrics_processor, "log_validation") as told:
        trainer.validator.validate(trainer.model_parts, 1)
    return told.call_args.args[0]


@pytest.mark.parametrize("documents", [5, 13])
def test_documents_count_whatever_the_degree(documents: int, tmp_path: Path) -> None:
    dice = random.Random(0)
    words = ("it", "is", "a", "truth", "universally", "acknowledged", "that", "man", "wants")
    # None is cut, so that every token sees the same wherever it is packed.
    texts = [" ".join(dice.choices(words, k=dice.randint(10, 60))) for _ in range(documents)]
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    (tmp_path / "data.jsonl").write_text(lines)
    cp = "--parallelism.context_parallel_degree"
    layouts = {(1, 1), (2, 1), (3, 1), (4, 2)}
    losses = [
        run_ranks(ranks, validate, str(tmp_path), cp, str(degree))[0] for ranks, degree in layouts
    ]
    assert losses == pytest.approx([losses[0]] * len(layouts), rel=1e-6)
