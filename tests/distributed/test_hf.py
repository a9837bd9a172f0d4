"""Hugging Face models on gloo rings equal the same model on one rank."""

import itertools

import pytest

from tests.helpers.hf_ring import (
    LAYERS,
    compare_all,
    different_batches,
    half_precision,
    leaks,
)
from tests.helpers.launch import run_ranks

DENSE = ("llama", "qwen2", "qwen3", "olmo2", "smollm3")
WINDOWED = ("mistral", "gemma3", "gpt_oss")
MODES = ("plain", "checkpointed", "fsdp2")
ALL = [
    *itertools.product(DENSE, (False, True), MODES),
    *itertools.product(("qwen3_moe", "mixtral", "qwen2_moe"), (False, True), ("plain",)),
    *itertools.product(WINDOWED, (False, True), (*MODES, "compiled")),
    *itertools.product(("llama",), (True,), ("selective", "compiled", "chunked")),
    *itertools.product(("qwen3",), (True,), ("chunked", "fsdp2 chunked")),
]
SAMPLE = [
    ("qwen3", True, "plain"),
    ("smollm3", True, "checkpointed"),
    ("llama", False, "fsdp2"),
    ("llama", True, "selective"),
    ("qwen3", True, "fsdp2 chunked"),
    ("qwen3", True, "shared heads"),
    ("mistral", True, "plain"),
    ("gemma3", False, "fsdp2"),
    ("gpt_oss", True, "checkpointed"),
]


def check(world_size: int, cases: list[tuple[str, bool, str]]) -> None:
    for results in run_ranks(world_size, compare_all, cases, timeout=280):
        for case, result in zip(cases, results, strict=True):
            assert result["loss"] < 1e-6, case
            assert result["gradients"] < 1e-5, case
            runs = {"checkpointed": 2, "compiled": 0}.get(case[2], 1)
            assert result["calls"] == runs * LAYERS, case


def test_a_sample_equals_one_rank() -> None:
    check(2, SAMPLE)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("name", [*DENSE, "qwen3_moe", "mixtral", "qwen2_moe", *WINDOWED])
def test_equals_one_rank(world_size: int, name: str) -> None:
    check(world_size, [case for case in ALL if case[0] == name])


@pytest.mark.slow
def test_shared_heads_beside_a_ring_equal_one_rank() -> None:
    cases = itertools.product(("llama", "qwen3_moe"), (False, True), ("shared heads",))
    check(4, list(cases))


def test_a_token_changes_no_logit_of_another_document() -> None:
    for changed in run_ranks(2, leaks, "qwen3"):
        assert changed == {
            "before": False,
            "after": True,
            "other documents": False,
            "other rows": False,
        }


def test_half_precision_is_as_near_to_the_exact_loss_as_one_rank() -> None:
    for loss in run_ranks(2, half_precision, "llama"):
        for way in ("one rank", "ring", "ring under autocast"):
            assert loss[way] == pytest.approx(loss["exact"], rel=1e-3), way


def test_ranks_with_different_batches_are_found_out() -> None:
    for error in run_ranks(2, different_batches):
        assert "pieces of different batches" in error
