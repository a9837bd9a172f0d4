"""docs/reference/parallelism.md names the cases that are tested: all of them, and no others."""

import re

from tests import ROOT
from tests.distributed import (
    test_checkpoints,
    test_parallelism,
    test_resume,
    test_training_options,
)

PAGE = ROOT / "docs/reference/parallelism.md"


def test_every_case_has_its_place_and_every_place_its_case() -> None:
    cases = {
        *test_parallelism.LAYOUTS,
        *test_training_options.EXACT,
        *test_training_options.NEAR,
        *(f"resume {name}" for name in test_checkpoints.LAYOUTS),
    }
    text = PAGE.read_text().partition("## What is refused")[0]
    tables = [line.split("|")[-2] for line in text.splitlines() if line.startswith("| ")]
    named = set(re.findall(r"`([^`]+)`", " ".join(tables)))
    named |= set(re.findall(r"`(resume [^`]+)`", text.replace("\n", " ")))
    assert named == cases


def test_named_tests_exist() -> None:
    names = set(re.findall(r"`(test_\w+)`", PAGE.read_text()))
    assert names
    for name in names:
        modules = (test_checkpoints, test_parallelism, test_resume, test_training_options)
        assert any(hasattr(module, name) for module in modules), name
