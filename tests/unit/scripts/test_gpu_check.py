"""scripts/gpu_check.py without a GPU: its sections on tiny sizes, and what becomes of a bad one."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace

import gpu_check
import pytest
import torch.distributed as dist
from bench import gpu_sections
from bench.gpu_sections import DRY_RUN, SECTIONS

from striped_cp.kernels import KERNELS
from tests import ROOT


@pytest.fixture
def no_process_group():
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.parametrize("name", [n for n in SECTIONS if n not in gpu_check.NEED_TORCHTITAN])
def test_a_section(name, no_process_group):
    rows = list(SECTIONS[name](DRY_RUN))
    assert rows
    assert all(row.get("ok", True) for row in rows)
    assert all(gpu_check.brief(json.loads(json.dumps(row))) for row in rows)


def test_every_section_has_a_share():
    assert list(gpu_check.SHARES) == list(SECTIONS)


def test_wrong_gradients_are_found(monkeypatch):
    right = KERNELS["cpu"].attend_backward

    def wrong(*args):
        dq, dk, dv = right(*args)
        return dq, dk * 1.001, dv

    monkeypatch.setattr(KERNELS["cpu"], "attend_backward", wrong)
    row = next(gpu_sections.correctness(replace(DRY_RUN, checked_rows=16)))
    assert not row["ok"]
    assert row["errors"]["dk"] == pytest.approx(1e-3, rel=0.1)


@pytest.mark.parametrize(
    ("ending", "status"),
    [
        ("", "passed"),
        ("raise ValueError('no')", "failed"),
        ("os.kill(os.getpid(), 11)", "failed"),
        ("print(json.dumps({'rates': {'ok': False}}))", "failed"),
        ("print('{}', flush=True); time.sleep(600)", "out of time"),
    ],
)
def test_a_section_ends(ending, status, tmp_path, monkeypatch):
    """Whatever ends it, its rows are kept."""
    script = tmp_path / "section.py"
    row = "print(json.dumps({'rates': {'x': 1}}), flush=True)"
    script.write_text(f"import json, os, time\n{row}\n{ending}\n")
    monkeypatch.setattr(gpu_check, "__file__", str(script))
    report = gpu_check.Report(tmp_path / "report.json", 10)
    # A busy machine may take long to start a Python, but not to be killed.
    gpu_check.run_section("rates", "cpu", 5 if "sleep" in ending else 100, report)
    section = report.content["sections"]["rates"]
    assert section["status"] == status
    if status != "out of time":
        assert section["rows"][0] == {"x": 1}
    if ending.startswith("raise"):
        assert "ValueError: no" in section["error"]


def test_a_run_that_is_stopped_leaves_what_it_found(tmp_path):
    path = tmp_path / "report.json"
    command = [sys.executable, "scripts/gpu_check.py", "--device", "cpu", "--json", str(path)]
    process = subprocess.Popen(
        [*command, "--budget", "1000"], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    deadline = time.monotonic() + 200
    while not path.exists():
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.1)
    children = subprocess.run(
        ["ps", "-o", "pid=", "--ppid", str(process.pid)], text=True, capture_output=True
    ).stdout.split()
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert errors.decode().strip() == "gpu_check.py: stopped"
    report = json.loads(path.read_text())
    assert report["environment"]["dry_run"]
    assert report["sections"]["correctness"]["rows"][0]["ok"]
    assert not [pid for pid in children if os.path.exists(f"/proc/{pid}")]


@pytest.mark.slow
@pytest.mark.timeout(1700)
def test_the_dry_run(tmp_path):
    path = tmp_path / "report.json"
    command = [sys.executable, "scripts/gpu_check.py", "--device", "cpu", "--json", str(path)]
    subprocess.run([*command, "--budget", "1500"], cwd=ROOT, check=True, timeout=1600)
    sections = json.loads(path.read_text())["sections"]
    assert {section["status"] for section in sections.values()} == {"passed"}
