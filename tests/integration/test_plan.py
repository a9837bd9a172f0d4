"""scripts/plan.py as a user runs it: every shipped recipe, options, refusals, speed."""

import json
import re
import resource
import subprocess
import sys

import pytest

from recipes.planner.hardware import GPUS
from recipes.planner.log import plan_line, plan_of_run
from recipes.preflight import load_config
from tests import ROOT

CONFIGS = sorted(ROOT.glob("train_configs/llama3_*.toml"))
EIGHT_GPUS = ROOT / "train_configs" / "llama3_8b_1m.toml"
# Two documents, 3 : 1, of 131,072 tokens.
DOCUMENTS = "98304,32768"


def run_plan(*args: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "scripts/plan.py", *map(str, args)],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )


def plan(*args: object) -> str:
    done = run_plan(*args)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.stem)
def test_shipped_recipes_fit_the_gpus_they_name(config):
    header = re.search(r"^# Hardware +(\d+) GPUs of 80 GB", config.read_text(), re.M)
    assert header is not None
    table = json.loads(plan(config, "--gpus", header[1], "--gpu", "h100", "--json"))
    assert table["fits"]
    assert table["tokens_per_second_per_gpu"] > 0
    parts, at_peak = table["memory"]["parts_bytes"], table["memory"]["at_peak"]
    assert sum(parts[name] for name in at_peak) == pytest.approx(table["memory"]["total_bytes"])
    assert sum(table["time"]["parts_s"].values()) == pytest.approx(table["time"]["step_s"])


def test_8b_at_1m_fits_8_gpus_of_80_gb():
    table = json.loads(plan(EIGHT_GPUS, "--gpus", 8, "--gpu", "h100", "--json"))
    assert table["mesh"] == {"dp_replicate": 1, "dp_shard": 1, "cp": 8, "tp": 1, "pp": 1}
    assert table["fits"]
    assert table["memory"]["total_bytes"] < 0.9 * 79.1 * 2**30


def test_takes_less_than_two_seconds_without_torch():
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    plan(EIGHT_GPUS, "--gpus", 8, "--gpu", "h100")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    # Processor time: the wall clock of a busy test machine says little.
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 2


def test_text_names_what_a_user_asks_for():
    text = plan(EIGHT_GPUS, "--gpus", 8, "--gpu", "h100")
    for expected in (
        "8 x H100 SXM 80 GB: cp 8",
        "checkpoints",
        "host memory",
        "bound by attention kernels",
        "tokens/s/GPU",
        "GPU hours per billion tokens",
        "(causal: only visible pairs count)",
        "(torchtitan: the full square counts)",
        "ring hop forward: 536870912 bytes",
        "hides from",
    ):
        assert expected in text


def test_overrides_reach_the_plan():
    args = (EIGHT_GPUS, "--gpus", 8, "--gpu", "h100", "--json")
    plain, changed = (
        json.loads(plan(*args, *more)) for more in ((), ("--memory.mlp_chunk_tokens", 0))
    )
    assert changed["memory"]["total_bytes"] > plain["memory"]["total_bytes"]


def test_a_plan_that_does_not_fit_says_so_and_fails():
    done = run_plan(EIGHT_GPUS, "--gpus", 8, "--gpu", "h100", "--memory.no_offload_checkpoints")
    assert "DOES NOT FIT" in done.stdout
    assert done.returncode == 1


def test_search_ranks_what_fits_and_writes_a_recipe_that_parses(tmp_path):
    best = tmp_path / "best.toml"
    args = (EIGHT_GPUS, "--gpus", 8, "--gpu", "h100", "--training.steps", 7)
    searched = run_plan(*args, "--search", "--write", best, "--json")
    assert searched.stderr == f"wrote {best}\n"
    plans = json.loads(searched.stdout)
    speeds = [float(f"{p['tokens_per_second_per_gpu']:.3g}") for p in plans]
    assert len(plans) > 3
    assert all(p["fits"] for p in plans)
    assert speeds == sorted(speeds, reverse=True)
    assert {p["tokens_per_step"] for p in plans} == {8 * 2**20}

    written = load_config(["--job.config_file", str(best)])
    assert written.parallelism.context_parallel_degree == plans[0]["mesh"]["cp"]
    assert written.training.steps == 7
    again = json.loads(plan(best, "--gpus", 8, "--gpu", "h100", "--json"))
    assert again == plans[0]


def test_layouts_of_packed_documents():
    args = (
        *(ROOT / "train_configs" / "llama3_8b_128k_packed.toml", "--gpus", 8, "--gpu", "h100"),
        *("--parallelism.context_parallel_degree", 8, "--layout", "--json"),
    )
    balance = {r["layout"]: r["balance"] for r in json.loads(plan(*args))}
    assert balance == {
        "contiguous": pytest.approx(0.533, abs=1e-3),
        "headtail": pytest.approx(1.0, abs=1e-3),
        "stripes of 128": pytest.approx(0.993, abs=1e-3),
        "stripes of 1": pytest.approx(1.0, abs=1e-3),
    }
    rows = json.loads(plan(*args, "--documents", DOCUMENTS))
    assert {r["layout"]: r["balance"] for r in rows} == {
        "contiguous": pytest.approx(0.455, abs=1e-3),
        "headtail": pytest.approx(0.625, abs=1e-3),
        "stripes of 128": pytest.approx(0.989, abs=1e-3),
        "stripes of 1": pytest.approx(1.0, abs=1e-3),
    }
    speed = {r["layout"]: r["tokens_per_second_per_gpu"] for r in rows}
    assert speed["stripes of 1"] > speed["headtail"] > speed["contiguous"]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--gpus", 33, "--gpu", "h100"), "parallelism.context_parallel_degree = 8: "),
        (("--gpus", 8, "--gpu", "h10"), '--gpu "h10": unknown; known: a100, h100'),
        (
            ("--gpus", 7, "--gpu", "h100", "--parallelism.context_parallel_degree", 7),
            "training.seq_len = 1048576: not divisible by parallelism.context_parallel_degree = 7",
        ),
        (("--gpus", 0, "--gpu", "h100"), "--gpus 0: at least 1"),
        (
            ("--gpus", 8, "--gpu", "h100", "--documents", "524288,524288"),
            "documents.mask = false: attention computes across documents",
        ),
        (("--gpus", 8, "--gpu", "h100", "--search", "--layout"), "--layout: --search has no use"),
        (
            ("--gpus", 8, "--gpu", "h100", "--search", "--write", "no/where.toml"),
            "--write no/where.toml: No such file or directory; a new file is allowed",
        ),
        (
            ("--gpus", 8, "--gpu", "h100", "--search", "--write", "README.md"),
            "--write README.md: File exists; a new file is allowed",
        ),
        (("--gpus", 8, "--gpu", "h100", "--network", "wifi"), '--network "wifi": unknown'),
        (
            ("--gpus", 8, "--gpu", "h100", "--documents.mask", "--documents", "5,6"),
            "--documents add up to 11 tokens, training.seq_len is 1048576",
        ),
        (
            ("--gpus", 8, "--gpu", "h100", "--documents.mask", "--documents", "5,x"),
            '--documents "5,x": positive',
        ),
        (("--gpus", 8, "--gpu", "h100", "--write", "x.toml"), "--write: writes the best plan"),
        (
            ("--gpus", 1, "--gpu", "h100", "--parallelism.context_parallel_degree", 1, "--search"),
            "fits on no mesh of 1 x H100",
        ),
        (("--gpus", 8, "--gpu", "h100", "--memory.chunks", 1), "memory.chunks"),
    ],
)
def test_nonsense_gets_one_line(args, message):
    done = run_plan(EIGHT_GPUS, *args)
    assert done.returncode == 2
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_the_log_of_a_run_has_the_plan():
    config = load_config(["--job.config_file", str(EIGHT_GPUS)])
    line = plan_line(plan_of_run(config, 8, "NVIDIA H100 80GB HBM3"))
    assert line.startswith(f"Plan for {GPUS['h100'].name}: ")
    assert "tokens/s/GPU" in line
    with pytest.raises(ValueError, match="no figures for device CPU"):
        plan_of_run(config, 8, "CPU")
    with pytest.raises(ValueError, match="allowed: degrees whose product divides 12"):
        plan_of_run(config, 12, "NVIDIA H100 80GB HBM3")
