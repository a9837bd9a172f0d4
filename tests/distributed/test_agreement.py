"""Ranks that do not agree never train, and hear who differs in what."""

import pytest
import torch.distributed as dist

from recipes.parallel.agreement import check_agreement, settings_and_code
from recipes.preflight import load_config
from recipes.process.faults import Stop
from tests.helpers.launch import run_ranks


def compare(odd: int, *settings: str) -> str:
    arguments = ["--job.config_file", "train_configs/debug_cpu.toml"]
    mine = settings if dist.get_rank() == odd else ()
    try:
        check_agreement(settings_and_code(load_config([*arguments, *mine])))
    except Stop as stop:
        return str(stop)
    return ""


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (("--optimizer.lr", "0.1"), "rank 2: optimizer.lr = 0.1, the others have 0.004"),
        (("--training.steps", "7"), "rank 2: training.steps = 7, the others have 60"),
        (("--model.hf_assets_path", "/of/this/host"), ""),
        ((), ""),
    ],
)
def test_settings_of_all_ranks_are_compared(settings: tuple[str, ...], said: str) -> None:
    for message in run_ranks(3, compare, 2, *settings):
        assert message == (f"startup check: the ranks do not agree: {said}" if said else "")


def compare_data() -> str:
    try:
        check_agreement({"the training data": f"of rank {dist.get_rank()}"})
    except Stop as stop:
        return str(stop)
    return ""


def test_data_of_all_ranks_are_compared() -> None:
    first, second = run_ranks(2, compare_data)
    assert first == second
    assert "rank 1: the training data = of rank 1, the others have of rank 0" in first
