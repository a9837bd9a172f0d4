"""Two torchrun agents, each in a network of its own, joined by one cable."""

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.faults import Disturbed
from tests.helpers.runs import TINY

DELAY = "0.01"
STEPS = 3


@pytest.fixture
def nodes() -> Iterator[list[tuple[tuple[str, ...], dict[str, str]]]]:
    """How to run something on each of two nodes: command before it, and environment."""
    names = [f"striped{os.getpid()}{node}" for node in "ab"]
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and iproute2")

    def ip(*args: str) -> None:
        subprocess.run(["ip", *args], check=True)

    found = []
    try:
        for name in names:
            ip("netns", "add", name)
        cable = ("link", "add", "cable0", "netns", names[0], "type", "veth")
        ip(*cable, "peer", "name", "cable0", "netns", names[1])
        for number, name in enumerate(names, 1):
            ip("-n", name, "addr", "add", f"10.77.0.{number}/24", "dev", "cable0")
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "link", "set", "cable0", "up")
            environment = {"GLOO_SOCKET_IFNAME": "cable0", "LOCAL_ADDR": f"10.77.0.{number}"}
            found.append((("ip", "netns", "exec", name), environment))
        yield found
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False)


def start(where: tuple, folder: Path, delay: str) -> Disturbed:
    wrapper, environment = where
    local_address = environment.pop("LOCAL_ADDR")
    rendezvous = ("--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "10.77.0.1:29511")
    return Disturbed(
        2,
        *TINY,
        *("--parallelism.context_parallel_degree", "4", "--training.steps", str(STEPS)),
        *("--job.dump_folder", str(folder)),
        # No name service knows the addresses: the host of the rendezvous cannot find out itself.
        torchrun=(
            *(*rendezvous, "--rdzv-id", "two", "--local-addr", local_address),
            *("--rdzv-conf", f"is_host={local_address == '10.77.0.1'}"),
        ),
        wrapper=wrapper,
        script="tests/helpers/delayed_train.py",
        DELAY_RANK="1",
        DELAY_SECONDS=delay,
        **environment,
    )


def train(nodes: list, folder: Path, delay: str) -> list[Disturbed]:
    runs = [start((command, dict(env)), folder, delay) for command, env in nodes]
    try:
        for run in runs:
            assert run.wait(250) == 0, run.output
    finally:
        for run in runs:
            run.stop()
    return runs


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_slow_cable_is_named_and_changes_no_loss(nodes: list, tmp_path: Path) -> None:
    plain, slow = (train(nodes, tmp_path / d, d) for d in ("0", DELAY))
    losses = [{**a.losses, **b.losses} for a, b in (plain, slow)]
    assert sorted(losses[0]) == list(range(1, STEPS + 1))
    assert losses[0] == losses[1]
    output = slow[0].output + slow[1].output
    assert "4 ranks on 2 nodes" in output
    named = re.findall(r"ring link (\d -> \d) is slow", output)
    assert "1 -> 2" in named
