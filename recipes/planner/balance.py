"""Layouts side by side, from the visible pairs that the ring's tiles count."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

from recipes.parallel.ring import named_layout
from recipes.planner.hardware import Gpu
from recipes.planner.plan import Plan, make_plan
from recipes.planner.run import Run
from striped_cp.documents import Documents
from striped_cp.layout import Layout
from striped_cp.tiles import tiles_of_rank

# Stripes as wide as a block of FlexAttention, beside token stripes.
_WIDE_STRIPE = 128


@dataclass(frozen=True)
class LayoutRow:
    """One layout of one run.

    Attributes:
        balance: share of the ring's time in which a rank computes:
            sum of all pairs / (P * sum over ring steps of the slowest rank's pairs).
    """

    name: str
    balance: float
    plan: Plan


def slowest_pairs(layout: Layout, run: Run) -> tuple[dict[int | None, tuple[float, ...]], float]:
    """Pairs of the slowest rank in every ring step of one sequence, by window, and the balance."""
    documents = None
    if run.documents:
        documents = Documents.from_cu_seqlens([list(accumulate(run.documents, initial=0))])
    slowest: dict[int | None, tuple[float, ...]] = {}
    computed = waited = 0.0
    for window, layers in run.shape.layers_by_window.items():
        by_rank = [
            [
                tile.pairs
                for tile in tiles_of_rank(layout, run.seq_len, run.ring, rank, documents, window)
            ]
            for rank in range(run.ring)
        ]
        slowest[window] = tuple(float(max(step)) for step in zip(*by_rank, strict=True))
        computed += layers * sum(map(sum, by_rank))
        waited += layers * run.ring * sum(slowest[window])
    return slowest, computed / waited


def with_counted_pairs(run: Run) -> Run:
    """`run` with the pairs of its packed documents and windows, if it has any."""
    if not (run.documents or run.shape.windowed):
        return run
    layout = named_layout(run.layout, run.block_size)
    return replace(run, slowest_pairs=slowest_pairs(layout, run)[0])


def compare_layouts(run: Run, gpu: Gpu, network_gb_s: float) -> list[LayoutRow]:
    """Contiguous, head-tail, wide stripes (where length and windows allow) and token stripes."""
    candidates = [
        replace(run, layout="contiguous", block_size=1),
        replace(run, layout="headtail", block_size=1),
        *([] if run.shape.windowed else [replace(run, layout="striped", block_size=_WIDE_STRIPE)]),
        replace(run, layout="striped", block_size=1),
    ]
    rows = []
    for candidate in candidates:
        layout = named_layout(candidate.layout, candidate.block_size)
        if run.seq_len % layout.length_divisor(run.cp, run.ulysses):
            continue
        pairs, balance = slowest_pairs(layout, candidate)
        counted = replace(candidate, slowest_pairs=pairs)
        name = (
            f"stripes of {candidate.block_size}" if candidate.layout == "striped" else layout.spec
        )
        rows.append(LayoutRow(name, balance, make_plan(counted, gpu, network_gb_s)))
    return rows


def layouts_text(rows: list[LayoutRow]) -> str:
    """Layouts side by side."""
    lines = ["layout           balance  attention s  step s  tok/s/GPU"]
    for row in rows:
        time = row.plan.time
        lines.append(
            f"{row.name:<17}{row.balance:7.3f}{time.parts['attention kernels']:13.2f}"
            f"{time.step_seconds:8.2f}{time.tokens_per_second_per_gpu:11.1f}"
        )
    return "\n".join(lines)


def layouts_table(rows: list[LayoutRow]) -> list[dict[str, Any]]:
    return [
        {
            "layout": row.name,
            "balance": row.balance,
            "attention_s": row.plan.time.parts["attention kernels"],
            "step_s": row.plan.time.step_seconds,
            "tokens_per_second_per_gpu": row.plan.time.tokens_per_second_per_gpu,
        }
        for row in rows
    ]
