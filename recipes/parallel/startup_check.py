"""Before training: does every ring pass on what it gets.

Every ring passes a known pattern once around, and every link is timed by itself; ranks that share
heads exchange one. A link that delivers something else, or nothing, ends the run and is named; a
slow one is named in the log.
"""

import contextlib
import time
from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.distributed as dist

from recipes.config.schema import StripedJobConfig
from recipes.process import faults
from recipes.titan import ParallelDims, logger
from striped_cp.process_group import ProcessGroupRing

# 256 KiB: on every kind of link latency and bandwidth both count.
_NUMBERS = 1 << 16
_REPEATS = 20
# A link is slow if there and back takes more than this many times the median of all links, and
# more than the seconds below: NVLink, InfiniBand and a sound Ethernet stay under them.
SLOW_RATIO = 4.0
SLOW_SECONDS = 2e-3
# Share of comm.init_timeout_seconds after which a silent neighbour is reported, so that it is
# before NCCL's own watchdog ends the process without saying whom it waited for.
_PATIENCE = 0.8


class Link(NamedTuple):
    """One hop of a ring, by ranks of the job. seconds: fastest of some trips there and back."""

    sender: int
    receiver: int
    broken: bool
    seconds: float

    def __str__(self) -> str:
        return f"{self.sender} -> {self.receiver}"


def run_startup_check(
    config: StripedJobConfig, parallel_dims: ParallelDims, device: torch.device
) -> None:
    """Check all rings; a collective of all ranks.

    Raises:
        Stop: on every rank, naming the links that deliver wrong data.
    """
    mesh = parallel_dims.get_optional_mesh("cp")
    if mesh is None:
        return
    patience = _PATIENCE * config.comm.init_timeout_seconds
    axes = [dim for dim in range(mesh.ndim) if mesh.size(dim) > 1]
    groups = [mesh.get_group(dim) for dim in axes]
    report([link for group in groups for link in check_ring(group, device, patience)])
    if 1 in axes:
        check_exchange(groups[-1], device, patience)


def check_ring(group: dist.ProcessGroup, device: torch.device, patience: float) -> list[Link]:
    """Pass a pattern around this rank's ring and time its links.

    Args:
        patience: seconds after which a silent neighbour ends the process.

    Returns:
        The links of all rings of the job, on every rank.
    """
    ring = ProcessGroupRing(group)
    members = ring.members()
    with _patience(members, ring.rank, patience):
        broken = not _pass_pattern(ring, device)
        seconds = _time_links(group, device)
    source = members[(ring.rank - 1) % ring.world_size]
    # Each rank tells of the link it receives over; the time of that link was taken by its sender.
    mine = torch.tensor([source, broken, seconds], dtype=torch.float64, device=device)
    rows = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, mine)
    table = torch.stack(rows).tolist()
    return [
        Link(int(sender), receiver, bool(wrong), table[int(sender)][2])
        for receiver, (sender, wrong, _) in enumerate(table)
    ]


def check_exchange(group: dist.ProcessGroup, device: torch.device, patience: float) -> None:
    """Exchange patterns among the ranks that share heads; a collective of all ranks.

    Raises:
        Stop: on every rank, naming the ranks that got something else.
    """
    axis = ProcessGroupRing(group)
    members, size = axis.members(), axis.world_size
    sent = torch.stack([_pattern(axis.rank * size + to, device) for to in range(size)])
    received = torch.zeros_like(sent)
    with _patience(members, axis.rank, patience):
        axis.all_to_all(received, sent).wait()
    wrong = [
        members[source]
        for source in range(size)
        if not torch.equal(received[source], _pattern(source * size + axis.rank, device))
    ]
    worst = torch.tensor([min(wrong, default=-1)], device=device)
    rows = [torch.empty_like(worst) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, worst)
    broken = [f"{int(row)} -> {rank}" for rank, row in enumerate(rows) if int(row) >= 0]
    if broken:
        raise faults.Stop(
            f"startup check: all-to-all delivers wrong data {', '.join(broken)} (ranks of the job, "
            "sender -> receiver); run NCCL's own tests"
        )


def report(links: list[Link]) -> None:
    """Log the times of the links; stop where one is broken."""
    broken = [str(link) for link in links if link.broken]
    if broken:
        raise faults.Stop(
            f"startup check: ring link {', '.join(broken)} delivers wrong data (ranks of the job, "
            "sender -> receiver); take the machine of one of them out, or run NCCL's own tests"
        )
    slow, median = slow_links(links)
    for link in slow:
        logger.warning(
            f"Startup check: ring link {link} is slow: {1e3 * link.seconds:.2f} ms there and back, "
            f"the median of all links is {1e3 * median:.2f} ms; every step of the ring waits for it"
        )
    worst = max(link.seconds for link in links)
    logger.info(
        f"Startup check: {len(links)} ring links deliver; 256 KiB there and back takes "
        f"{1e3 * median:.2f} ms in the median, {1e3 * worst:.2f} ms at most"
    )


def slow_links(links: list[Link]) -> tuple[list[Link], float]:
    """Links that hold up their ring, and the (lower) median in seconds."""
    median = sorted(link.seconds for link in links)[(len(links) - 1) // 2]
    limit = max(SLOW_RATIO * median, SLOW_SECONDS)
    return [link for link in links if link.seconds > limit], median


def _pattern(origin: int, device: torch.device) -> torch.Tensor:
    """What rank `origin` of a ring sends around: int32, different in every place of every rank."""
    return torch.arange(_NUMBERS, dtype=torch.int32, device=device) * 31 + origin * 1_000_003


def _pass_pattern(ring: ProcessGroupRing, device: torch.device) -> bool:
    """Whether all that came over the link from the rank before was right.

    In hop t a rank gets the pattern of the rank t + 1 places before it. What is wrong is replaced
    before it goes on, so that only the link is blamed on which it went wrong.
    """
    held = _pattern(ring.rank, device)
    right = True
    for hop in range(ring.world_size):
        arriving = torch.zeros_like(held)
        ring.shift((held,), (arriving,)).wait()
        expected = _pattern((ring.rank - hop - 1) % ring.world_size, device)
        right = torch.equal(arriving, expected) and right
        held = expected
    return right


def _time_links(group: dist.ProcessGroup, device: torch.device) -> float:
    """Seconds to the next rank and back, the fastest of some trips.

    Links with a rank in common are timed one after the other, so that a slow one does not hold up
    its neighbours: those that start at even ranks, at odd ranks, and the last one of an odd ring.
    """
    rank, size = group.rank(), group.size()
    payload, answer = (torch.zeros(_NUMBERS, dtype=torch.int32, device=device) for _ in range(2))

    def move(operation, tensor: torch.Tensor, peer: int) -> None:
        for work in dist.batch_isend_irecv(
            [dist.P2POp(operation, tensor, group=group, group_peer=peer)]
        ):
            work.wait()

    best = float("inf")
    for turn in range(3):
        for _ in range(_REPEATS):
            if _turn(rank, size) == turn:
                _synchronize(device)
                start = time.perf_counter()
                move(dist.isend, payload, (rank + 1) % size)
                move(dist.irecv, answer, (rank + 1) % size)
                _synchronize(device)
                best = min(best, time.perf_counter() - start)
            elif _turn((rank - 1) % size, size) == turn:
                move(dist.irecv, payload, (rank - 1) % size)
                move(dist.isend, answer, (rank - 1) % size)
    return best


def _turn(sender: int, size: int) -> int:
    return 2 if size % 2 and sender == size - 1 else sender % 2


def _synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize()


@contextlib.contextmanager
def _patience(members: list[int], rank: int, seconds: float) -> Iterator[None]:
    """End the process if the scope is not left in time, and say for whom it waits."""
    source, mine = members[rank - 1], members[rank]

    def give_up() -> None:
        if not faults.waits_for_a_waiting_rank(mine, source):
            faults.leave_now(
                f"startup check: rank {mine} has waited {seconds:.0f} s for rank {source} "
                f"(ring link {source} -> {mine}): that rank or the link is silent",
                mine,
            )

    with faults.deadline(seconds, give_up):
        yield
