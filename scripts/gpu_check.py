"""What needs a GPU to be known, in one command: four minutes, one GPU, no network.

    python scripts/gpu_check.py --json docs/results/gpu_check.json

    correctness  every CUDA kernel against plain attention in float32, forward and backward
    rates        TFLOP/s of causal tiles of 16K and 64K rows, forward and backward
    documents    one long document and 500 short ones: time and peak memory of a rank of eight
    hops         NCCL beside a kernel, on streams of normal and high priority
    offload      checkpoints that wait in host memory: what they save and cost
    flex         the kernel that compiles
    rings        all tiles of rings of 8, 16 and 32 ranks, three layouts, with documents or not
    recipe       the debug model, end to end
    levers       peak memory of a long training step as the memory levers come on

Needs torch 2.11 or later and numpy; the last two also what ./scripts/install.sh installs. A section
has a share of the time, and no more than earlier ones leave; the report is written again after
every row, so that a run that is stopped leaves what it found. A section that fails is reported and
the others still run; the exit status is then 1. `--device cpu` is a dry run of this script itself,
with tiny sizes: it says nothing about GPUs.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from arguments import positive

# Section: its largest part of the budget. The modules that measure are imported by the process of
# a section: --help is not to wait for torch.
SHARES = {
    "correctness": 0.35,
    "rates": 0.3,
    "documents": 0.2,
    "hops": 0.15,
    "offload": 0.15,
    "flex": 0.25,
    "rings": 0.4,
    "recipe": 0.4,
    "levers": 0.6,
}
NEED_TORCHTITAN = ("recipe", "levers")
ROOT = Path(__file__).parents[1]


class Report:
    """What was found so far; the file is always whole."""

    def __init__(self, path: Path | None, budget: int) -> None:
        self.path = path
        self.content: dict[str, Any] = {"environment": {}, "budget_s": budget, "sections": {}}

    def write(self) -> None:
        if self.path is None:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        part = self.path.with_name(f"{self.path.name}.part")
        part.write_text(json.dumps(self.content, indent=1) + "\n")
        part.replace(self.path)


def run_section(name: str, device: str, limit: float, report: Report) -> None:
    """Run one section in a process of its own, for at most `limit` seconds."""
    section: dict[str, Any] = {"status": "running", "rows": []}
    report.content["sections"][name] = section
    started = time.monotonic()
    command = [sys.executable, __file__, "--device", device, "--section", name]
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, text=True, cwd=ROOT, process_group=0
        )
        clock = threading.Timer(limit, kill, (process,))
        clock.start()
        try:
            assert process.stdout is not None
            for line in process.stdout:
                row = json.loads(line)
                if name not in row:
                    report.content["environment"] = row
                    continue
                section["rows"].append(row[name])
                print("  ", brief(row[name]), flush=True)
                report.write()
            process.wait()
        finally:
            clock.cancel()
            kill(process)
            process.wait()
        section["seconds"] = time.monotonic() - started
        if process.returncode == -signal.SIGKILL and section["seconds"] >= limit:
            section["status"] = "out of time"
        elif process.returncode or any(not row.get("ok", True) for row in section["rows"]):
            section["status"] = "failed"
            errors.seek(0)
            section["error"] = errors.read()[-4000:]
            print(section["error"], flush=True)
        else:
            section["status"] = "passed"


def kill(process: subprocess.Popen) -> None:
    """The section and what it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def brief(row: dict[str, Any]) -> str:
    """One line of a row."""
    parts = []
    for key, value in row.items():
        if isinstance(value, dict):
            value = max(value.values(), key=float, default=0.0) if key == "errors" else "..."
        elif isinstance(value, list):
            value = f"{len(value)} of them"
        parts.append(f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}")
    return ", ".join(parts[:12])


def print_rows(name: str, device: str) -> None:
    """The process of a section: a row a line on stdout; what anything else prints is no row."""
    rows = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    sys.path.insert(0, str(ROOT))
    from bench.gpu_sections import SECTIONS, SIZES, environment

    print(json.dumps(environment(device)), file=rows, flush=True)
    for row in SECTIONS[name](SIZES[device]):
        print(json.dumps({name: row}), file=rows, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--budget", type=positive, default=240, metavar="SECONDS")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--section", choices=SHARES, help="print its rows as JSON, and no more")
    arguments = parser.parse_args()
    if arguments.section:
        print_rows(arguments.section, arguments.device)
        return 0
    for needed in ("torch", "numpy"):
        if importlib.util.find_spec(needed) is None:
            sys.exit(f"gpu_check.py: this Python has no {needed}; ./scripts/install.sh makes .venv")
    # Whoever stops this script stops its section too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("gpu_check.py: stopped"))
    report = Report(arguments.json, arguments.budget)
    end = time.monotonic() + arguments.budget
    for name, share in SHARES.items():
        left = end - time.monotonic()
        print(f"== {name}", flush=True)
        if name in NEED_TORCHTITAN and importlib.util.find_spec("torchtitan") is None:
            report.content["sections"][name] = {"status": "torchtitan is not installed"}
        elif left < 1:
            report.content["sections"][name] = {"status": "no time left"}
        else:
            limit = min(left, share * arguments.budget)
            run_section(name, arguments.device, limit, report)
        report.write()
        print("  ", report.content["sections"][name]["status"], flush=True)
    status = {name: section["status"] for name, section in report.content["sections"].items()}
    failed = [name for name, how in status.items() if how == "failed"]
    print("failed: " + ", ".join(failed) if failed else "no section failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
