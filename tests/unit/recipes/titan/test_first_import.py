"""What a process imports before it has read its arguments, and how torchtitan finds its host."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests import ROOT

RUN = """
import runpy, sys
heavy = [{heavy}]
sys.argv = {argv!r}
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
except SystemExit as end:
    status = end.code
else:
    status = 0
print("imported", [name for name in heavy if name in sys.modules], status)
"""
RECIPE = "train_configs/llama3_8b_1m.toml"
HEAVY = ("torch", "torchtitan", "datasets", "matplotlib")


def imported(*argv: str) -> str:
    code = RUN.format(heavy=", ".join(map(repr, HEAVY)), argv=list(argv))
    run = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={"RANK": "0", "WORLD_SIZE": "1", "PYTHONPATH": f"{ROOT}:{ROOT}/scripts"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert "Traceback" not in run.stderr, run.stderr
    return run.stdout.splitlines()[-1]


@pytest.mark.parametrize(
    "script",
    [
        "train.py",
        "scripts/bench_attention.py",
        "scripts/convert_checkpoint.py",
        "scripts/evaluate.py",
        "scripts/gpu_check.py",
        "scripts/inspect_data.py",
        "scripts/plan.py",
        "scripts/prepare_documents.py",
        "scripts/train_tokenizer.py",
    ],
)
def test_help_waits_for_nothing(script: str) -> None:
    assert imported(script, "--help") == "imported [] 0"


def test_a_misspelled_key_waits_for_nothing() -> None:
    line = imported("train.py", "--job.config_file", RECIPE, "--training.seq_lenght", "8")
    assert line == "imported [] 2"


def test_the_planner_does_without_torch() -> None:
    assert imported("scripts/plan.py", RECIPE, "--gpus", "8", "--gpu", "h100") == "imported [] 0"


CODE = """
import sys
import recipes
from recipes.parallel.ring import Layout
from recipes.titan import ConfigManager, job_config
before = "torch" in sys.modules
import striped_cp, torchtitan.config
from torchtitan.tools import utils
print(before, torchtitan.config.job_config is job_config,
      torchtitan.config.ConfigManager is ConfigManager,
      striped_cp.Layout is Layout, utils.device_type)
"""


def test_what_was_loaded_alone_is_what_its_package_finds() -> None:
    command = [sys.executable, "-c", CODE]
    environment = {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    run = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200
    )
    assert run.stdout == "False True True True cpu\n", run.stderr


@pytest.mark.parametrize(
    "command",
    [
        ("train.py", "--help"),
        ("scripts/plan.py", RECIPE, "--gpus", "8", "--gpu", "h100"),
        ("scripts/prepare_documents.py", "--help"),
        ("scripts/train_tokenizer.py", "--help"),
    ],
    ids=lambda command: command[0],
)
def test_the_recipes_of_another_project_are_not_taken_for_ours(
    command: tuple[str, ...], tmp_path: Path
) -> None:
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "__init__.py").write_text("raise ModuleNotFoundError('not a package')")
    run = subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env={"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert run.returncode == 0, run.stderr
