"""Run a function on gloo ranks, each a process, with a time limit instead of a hang."""

from __future__ import annotations

import multiprocessing
import multiprocessing.queues
import queue
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

# The fork server imports torch once; ranks are forked from it in milliseconds.
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["torch", "torch.distributed.tensor", "recipes.train.spec"])


def run_ranks(
    world_size: int, check: Callable[..., Any], *args: Any, timeout: float = 90.0
) -> list[Any]:
    """Call `check(*args)` on every rank of a fresh gloo group; the results by rank.

    `check` must be importable and return plain data (no tensors).

    Raises:
        AssertionError: a rank failed (its traceback is the message), died, or took too long.
    """
    with tempfile.TemporaryDirectory() as folder:
        results: multiprocessing.queues.Queue = _context.Queue()
        store = str(Path(folder) / "store")
        ranks = [
            _context.Process(
                target=_rank_main, args=(rank, world_size, store, results, check, args), daemon=True
            )
            for rank in range(world_size)
        ]
        for process in ranks:
            process.start()
        try:
            return _collect(results, ranks, time.monotonic() + timeout)
        finally:
            for process in ranks:
                process.kill()
                process.join()


def _collect(results: Any, ranks: list[Any], deadline: float) -> list[Any]:
    collected: dict[int, Any] = {}
    while len(collected) < len(ranks):
        try:
            rank, error, value = results.get(timeout=0.2)
        except queue.Empty:
            missing = [r for r in range(len(ranks)) if r not in collected]
            assert time.monotonic() < deadline, f"ranks {missing} did not finish in time"
            dead = [r for r in missing if ranks[r].exitcode not in (None, 0)]
            assert not dead, f"ranks {dead} died"
            continue
        assert error is None, f"rank {rank} failed:\n{error}"
        collected[rank] = value
    return [collected[rank] for rank in range(len(ranks))]


def _rank_main(
    rank: int, world_size: int, store: str, results: Any, check: Callable[..., Any], args: tuple
) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=60),
    )
    try:
        results.put((rank, None, check(*args)))
        dist.barrier()
        dist.destroy_process_group()
    except Exception:
        results.put((rank, traceback.format_exc(), None))
