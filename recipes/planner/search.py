"""Degrees and levers that fit, fastest first."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from recipes.planner.hardware import Gpu
from recipes.planner.plan import Plan, make_plan
from recipes.planner.run import Levers, Run, check

# Tokens per chunk where a lever is on.
_LOSS_CHUNK = 2048
_MLP_CHUNK = 8192


def search(
    run: Run, sequences: int | None, gpu: Gpu, network_gb_s: float, kernels: tuple[str, ...]
) -> list[Plan]:
    """The best plan of every mesh on which `run` fits comfortably, fastest first.

    Every mesh of `run.gpus` GPUs is tried with every combination of memory levers.

    Args:
        sequences: of a step, as `run_to_search` returns it. A mesh whose data-parallel ranks would
            get no whole number of them is left out. None: each rank gets `run.local_batch`.
        kernels: attention kernels to try.
    """
    best = []
    for mesh in _meshes(run, sequences, gpu):
        plans = [
            make_plan(candidate, gpu, network_gb_s)
            for shared in degrees_of_ulysses(mesh, gpu)
            for levers in _levers(run)
            for kernel in kernels
            for candidate in [replace(shared, levers=levers, kernel=kernel)]
        ]
        fitting = [plan for plan in plans if plan.comfortable]
        if fitting:
            best.append(max(fitting, key=_rank))
    return sorted(best, key=_rank, reverse=True)


def _rank(plan: Plan) -> tuple[float, int, float]:
    """Speed, to three digits; then less model parallelism; then less memory."""
    speed = float(f"{plan.time.tokens_per_second_per_gpu:.3g}")
    return speed, -plan.run.tp * plan.run.pp, -plan.memory.total


def _divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


def _meshes(run: Run, sequences: int | None, gpu: Gpu) -> Iterator[Run]:
    """Every split of the GPUs over dp_shard, cp, tp and pp that training accepts.

    Tensor parallelism stays inside a node.
    """
    divisors = _divisors(run.gpus)
    for tp, pp, cp in product(_divisors(gpu.gpus_per_node), divisors, divisors):
        data_parallel, rest = divmod(run.gpus, tp * pp * cp)
        # A pipeline needs as many microbatches as it has stages.
        total = sequences or run.local_batch * pp * data_parallel
        if rest or total % data_parallel:
            continue
        per_rank = total // data_parallel
        # A pipeline takes all sequences at once, as microbatches.
        local_batch = per_rank if pp > 1 else min(run.local_batch, per_rank)
        if per_rank % local_batch:
            continue
        mesh = replace(
            run,
            dp_replicate=1,
            dp_shard=data_parallel,
            cp=cp,
            tp=tp,
            pp=pp,
            local_batch=local_batch,
            gradient_accumulation=per_rank // local_batch,
            pp_microbatch=1,
        )
        try:
            check(mesh, gpu)
        except ValueError:
            continue
        yield mesh


def degrees_of_ulysses(run: Run, gpu: Gpu) -> Iterator[Run]:
    """`run` with every number of ranks that can share heads inside a node."""
    from recipes.planner.balance import with_counted_pairs  # late: it imports what counts tiles

    for degree in _divisors(math.gcd(run.cp, run.shape.n_heads // run.tp)):
        if degree == 1 or degree * run.tp <= gpu.gpus_per_node:
            candidate = replace(run, ulysses=degree, slowest_pairs={})
            with contextlib.suppress(ValueError):
                check(candidate, gpu)
                yield with_counted_pairs(candidate)


def _levers(run: Run) -> list[Levers]:
    """Combinations of levers that training accepts (`recipes.preflight.levers`)."""
    given = run.levers
    # Chunks of the loss do not go with a Float8 output projection or with whole vocabularies.
    chunkable = given.loss_chunk_tokens or (run.loss_parallel and not run.float8)
    loss_chunks = (given.loss_chunk_tokens or _LOSS_CHUNK, 0) if chunkable else (0,)
    mlp_chunks = (0, given.mlp_chunk_tokens or _MLP_CHUNK)
    plain = product(("none",), (False,), (False,), loss_chunks, mlp_chunks)
    by_operator = product(("selective",), (False, True), (False,), loss_chunks, (0,))
    offloads = (False,) if run.compiled else (False, True)
    whole_blocks = product(("full",), (False, True), offloads, loss_chunks, mlp_chunks)
    return [Levers(*levers) for levers in (*plain, *by_operator, *whole_blocks)]
