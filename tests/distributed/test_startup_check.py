"""The startup check names the link that is broken, silent or slow, and no other."""

import contextlib
import re
import time
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from recipes.parallel import startup_check
from recipes.parallel.startup_check import Link, check_exchange, check_ring, report, slow_links
from recipes.process import faults
from striped_cp.process_group import ProcessGroupRing
from tests.helpers.launch import run_ranks

CPU = torch.device("cpu")
DELAY = 0.05


@contextlib.contextmanager
def slow_link(sender: int):
    """Rank `sender` hands over everything DELAY seconds late, if it goes to the next rank."""
    send = dist.P2POp

    def late(operation, tensor, peer=None, group=None, tag=0, group_peer=None):
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        onwards = group_peer == (rank + 1) % size
        if operation is dist.isend and dist.get_rank() == sender and onwards:
            time.sleep(DELAY)
        return send(operation, tensor, peer, group, tag, group_peer)

    with mock.patch.object(dist, "P2POp", late):
        yield


@contextlib.contextmanager
def wrong_link(sender: int):
    """One number of what rank `sender` sends arrives wrong."""
    shift = ProcessGroupRing.shift

    def corrupt(self, send, receive):
        if dist.get_rank() == sender:
            send = [x.clone() for x in send]
            send[0][-1] += 1
        return shift(self, send, receive)

    with mock.patch.object(ProcessGroupRing, "shift", corrupt):
        yield


def check_all(fault, sender):
    with fault(sender) if fault else contextlib.nullcontext():
        return check_ring(dist.group.WORLD, CPU, patience=30)


def links(results):
    assert all(result == results[0] for result in results)
    return [Link(*link) for link in results[0]]


@pytest.mark.parametrize("size", [2, 3])
def test_a_sound_ring(size):
    found = links(run_ranks(size, check_all, None, 0))
    assert [str(link) for link in found] == [f"{(r - 1) % size} -> {r}" for r in range(size)]
    assert not any(link.broken for link in found)
    assert all(0 < link.seconds < 1 for link in found)


def test_a_slow_link_is_named(monkeypatch):
    # Four ranks on a busy machine wait for each other too.
    monkeypatch.setattr(startup_check, "SLOW_SECONDS", DELAY / 2)
    found = links(run_ranks(4, check_all, slow_link, 2))
    slow, median = slow_links(found)
    assert [str(link) for link in slow] == ["2 -> 3"]
    assert slow[0].seconds > DELAY
    assert median < DELAY


@pytest.mark.parametrize("sender", [0, 2])
def test_wrong_data_is_blamed_on_one_link(sender):
    found = links(run_ranks(3, check_all, wrong_link, sender))
    assert [str(link) for link in found if link.broken] == [f"{sender} -> {(sender + 1) % 3}"]
    with pytest.raises(faults.Stop, match=f"ring link {sender} -> {(sender + 1) % 3} delivers"):
        report(found)


def subgroup_links(pairs):
    groups = [dist.new_group(pair) for pair in pairs]
    mine = next(g for g, pair in zip(groups, pairs, strict=True) if dist.get_rank() in pair)
    return check_ring(mine, CPU, patience=30)


def test_every_rank_knows_the_links_of_all_rings():
    found = links(run_ranks(4, subgroup_links, [[0, 2], [1, 3]]))
    assert [str(link) for link in found] == ["2 -> 0", "3 -> 1", "0 -> 2", "1 -> 3"]


def exchange(sender):
    """What is said where one rank of two pairs sends something else; None: none does."""
    groups = [dist.new_group(pair) for pair in ([0, 1], [2, 3])]
    mine = groups[dist.get_rank() // 2]
    original = ProcessGroupRing.all_to_all

    def wrong(self, out, x):
        return original(self, out, x + (dist.get_rank() == sender))

    with mock.patch.object(ProcessGroupRing, "all_to_all", wrong):
        try:
            check_exchange(mine, CPU, patience=30)
        except faults.Stop as stop:
            return str(stop)


def test_an_exchange_of_something_else_is_named_by_all_ranks():
    assert run_ranks(4, exchange, None) == [None] * 4
    for said in run_ranks(4, exchange, 3):
        assert "all-to-all delivers wrong data 3 -> 2, 3 -> 3 (" in said


def wait_for_silent_rank(silent):
    """What this rank says when its patience is over; the silent one takes part too late."""
    if dist.get_rank() == silent:
        time.sleep(5)
    said = []
    with mock.patch.object(faults, "leave_now", lambda message, rank: said.append(message)):
        check_ring(dist.group.WORLD, CPU, patience=2)
    return said


def test_a_silent_rank_is_named_by_the_rank_behind_it_alone():
    said = run_ranks(3, wait_for_silent_rank, 1)
    assert said[0] == said[1] == []
    (message,) = said[2]
    assert "rank 2 has waited 2 s for rank 1 (ring link 1 -> 2)" in message


def hang_in_the_ring(silent, way):
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=2), None)
    if dist.get_rank() == silent:
        time.sleep(10)
    ring = ProcessGroupRing(dist.group.WORLD)
    x = torch.zeros(3, 4)
    for _ in range(3):
        if way == "shift":
            ring.shift((x,), (torch.empty_like(x),)).wait()
        elif way == "all_to_all":
            ring.all_to_all(torch.empty_like(x), x).wait()
        else:
            ring.all_gather(x.new_empty(3, 3, 4), x).wait()


@pytest.mark.parametrize("way", ["shift", "all_to_all", "all_gather"])
def test_a_hang_in_the_ring_names_the_ranks_that_it_waits_for(way):
    with pytest.raises(AssertionError) as failed:
        run_ranks(3, hang_in_the_ring, 1, way)
    # Of a hop, one of the two ranks beside the silent one.
    expected = {
        "shift": r"ring: rank (2 waited for keys from rank 1 and for rank 0|"
        r"0 waited for keys from rank 2 and for rank 1) to take its own: .*[Tt]imed out"
    }
    everyone = r"ring: rank [02] waited for one of the ranks \[0, 1, 2\]: .*[Tt]imed out"
    assert re.search(expected.get(way, everyone), str(failed.value))


def test_what_counts_as_slow():
    def ring(*times):
        return [Link(i, i + 1, False, t) for i, t in enumerate(times)]

    assert slow_links(ring(1e-4, 1e-4, 1.9e-3))[0] == []  # below 2 ms nothing is slow
    assert [link.sender for link in slow_links(ring(1e-4, 1e-4, 2.1e-3))[0]] == [2]
    assert slow_links(ring(5e-3, 5e-3, 19e-3))[0] == []  # below 4 times the median
    assert [link.sender for link in slow_links(ring(5e-3, 5e-3, 21e-3))[0]] == [2]
