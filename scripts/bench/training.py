"""A run of train.py, and what it says about itself at its end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def train(config: Path | str, world_size: int, *settings: str) -> dict[str, Any]:
    """The run's summary.json.

    Raises:
        ValueError: the run failed; the message has the end of its output.
    """
    with tempfile.TemporaryDirectory() as folder:
        command = [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc_per_node", str(world_size), "train.py", "--job.config_file", str(config)),
            *("--job.dump_folder", folder, "--metrics.log_freq", "1"),
            *("--parallelism.context_parallel_degree", str(world_size)),
            *settings,
        ]
        environment = {"OMP_NUM_THREADS": "1", **os.environ}
        run = subprocess.run(
            command, cwd=ROOT, env=environment, text=True, capture_output=True, check=False
        )
        if run.returncode != 0:
            raise ValueError(f"train.py failed: {(run.stdout + run.stderr)[-3000:]}")
        return json.loads((Path(folder) / "summary.json").read_text())
