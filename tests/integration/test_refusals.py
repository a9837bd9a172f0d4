"""A wrong setting stops every rank at once, with one line on the screen."""

import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.helpers.runs import RECIPE, ROOT, torchrun


@pytest.mark.parametrize(
    ("lines", "parts"),
    [
        ("[training]\nseq_lenght = 8\n", ["training.seq_lenght", "training.seq_len"]),
        (
            '[parallelism]\ncontext_parallel_degree = "2"\n',
            ['parallelism.context_parallel_degree = "2"', "an integer"],
        ),
    ],
)
def test_torchrun_stops_with_one_line(tmp_path: Path, lines: str, parts: list[str]) -> None:
    recipe = tmp_path / "wrong.toml"
    recipe.write_text(lines)
    run = torchrun(2, recipe=str(recipe), timeout=60)
    assert run.status != 0
    ours = [line for line in run.output.splitlines() if line.startswith(str(recipe))]
    assert len(ours) == 1
    for part in parts:
        assert part in ours[0]
    # The launcher reports one failure, of the rank that spoke.
    assert re.findall(r"rank +: (\d+) .*\n  exitcode  : (\d+)", run.output) == [("0", "2")]
    assert "[rank" not in run.output


def test_every_rank_stops_before_there_is_a_process_group() -> None:
    """Ranks started one by one, without anything to meet at."""
    command = [sys.executable, "train.py", "--job.config_file", RECIPE]
    command += ["--parallelism.context_parallel_degree", "3"]
    start = time.monotonic()
    ranks = [
        subprocess.Popen(
            command,
            cwd=ROOT,
            env={"PATH": "", "RANK": str(rank), "WORLD_SIZE": "3"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    outputs = [process.communicate(timeout=60)[0] for process in ranks]
    assert [process.returncode for process in ranks] == [2, 2]
    assert time.monotonic() - start < 60
    assert outputs[1] == ""
    (line,) = outputs[0].splitlines()
    assert "training.seq_len = 1024" in line
    assert "parallelism.context_parallel_degree = 3" in line
    assert "nearest 1023 and 1026" in line
