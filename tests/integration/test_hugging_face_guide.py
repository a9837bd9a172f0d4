"""The script of docs/guides/hugging_face.md, as it stands there."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests import ROOT


def test_two_ranks_train_as_one(tmp_path: Path) -> None:
    (script,) = re.findall(
        r"```python\n(import sys.*?)```",
        (ROOT / "docs/guides/hugging_face.md").read_text(),
        re.DOTALL,
    )
    assert len(script.splitlines()) <= 60
    file = tmp_path / "finetune.py"
    file.write_text(script)
    printed = []
    for ranks in (1, 2):
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        run = subprocess.run(
            [*torchrun, "--nproc_per_node", str(ranks), str(file)],
            env={"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=250,
        )
        assert run.returncode == 0, run.stderr
        printed.append([float(x) for x in re.findall(r"(?:loss|norm) ([\d.]+)", run.stdout)])
    assert len(printed[0]) == 8
    assert printed[0] == pytest.approx(printed[1], abs=2e-3)
    assert printed[0][6] < printed[0][0] - 0.1  # it learns
