"""Trainer and SFTTrainer, packed, ten steps: a ring of two ranks equals one rank."""

import math

import pytest

from tests.helpers.launch import run_ranks

pytest.importorskip("accelerate")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.mark.parametrize("kind", ["plain", "sft"])
def test_ten_packed_steps_equal_one_rank(kind: str) -> None:
    if kind == "sft":
        pytest.importorskip("trl")
    from tests.helpers.hf_trainer import STEPS, train

    (alone,) = run_ranks(1, train, kind, 1, timeout=200)
    assert len(alone["losses"]) == STEPS
    assert len({round(x, 4) for x in alone["losses"]}) > STEPS / 2  # every step is another batch
    ring, same = run_ranks(2, train, kind, 2, timeout=200)
    for result in (ring, same):
        assert result["losses"] == pytest.approx(alone["losses"], rel=1e-6)
        assert result["gradients"] == pytest.approx(alone["gradients"], rel=1e-5)
        assert result["weights"] == pytest.approx(alone["weights"], rel=1e-6)
        assert math.isclose(result["evaluated"], alone["evaluated"], rel_tol=1e-6)
