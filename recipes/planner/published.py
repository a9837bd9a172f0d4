"""Published training runs, and what the planner predicts for each.

    python -m recipes.planner.published

prints the table of docs/reference/planner.md. Only the rows marked "fit" were looked at to choose
`LINEAR_SHARE`, `FLOAT8_SPEEDUP` and `ALLOCATOR_SLACK`; they are not counted as checks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from recipes.models.llama3 import LLAMA3
from recipes.models.qwen3 import QWEN3
from recipes.planner.footprint import GIB, plan_memory
from recipes.planner.hardware import GPUS, find_network_gb_s
from recipes.planner.run import Levers, Run, check
from recipes.planner.step_time import TimePlan, plan_time

_LLAMA3 = LLAMA3.flavors
TITAN = "torchtitan, benchmarks/llama3_h100_202412_torchtitan.md"
TRL = "TRL 1.13.0, examples/sft_qwen3_8b_1m_context and docs/source/long_context_training.md"
ALST = "ALST, arXiv 2506.13996, ablation table"
HERD = "Llama 3 Herd, arXiv 2407.21783 v3, table 4"

# How authors report speed, and the planner's figure for it.
MEASURES: dict[str, Callable[[TimePlan], float]] = {
    "tok/s/GPU": lambda plan: plan.tokens_per_second_per_gpu,
    "s/step": lambda plan: plan.step_seconds,
    "causal TFLOPS on H100": lambda plan: plan.mfu_causal * GPUS["h100"].peak_tflops,
}


@dataclass(frozen=True)
class Published:
    """One published run: how it was set up, and what its authors report.

    Attributes:
        throughput: as reported.
        unit: its unit, a key of MEASURES.
        reserved_gib: peak memory as reported, in GiB (GB converted).
        remark: what is assumed about the run, or why the planner misses it.
        fit: whether constants were chosen on this row.
    """

    name: str
    source: str
    gpu: str
    run: Run
    throughput: float
    unit: str
    reserved_gib: float | None = None
    remark: str = ""
    fit: bool = False

    def predicted_throughput(self) -> float:
        gpu = GPUS[self.gpu]
        check(self.run, gpu)
        return MEASURES[self.unit](plan_time(self.run, gpu, find_network_gb_s(gpu.network)))

    def predicted_gib(self) -> float:
        """What torch would report as reserved."""
        return plan_memory(self.run).reserved / GIB


# torchtitan of December 2024: FlashAttention-2, K and V repeated to all heads and all-gathered,
# head-tail layout, logits not chunked.
_TITAN_LEVERS = Levers(checkpointing="full", recompute_attention=True, loss_chunk_tokens=0)
_SELECTIVE = Levers(checkpointing="selective", loss_chunk_tokens=0)


def _titan_8b(cp: int) -> Run:
    return Run(
        _LLAMA3["8B"],
        seq_len=32768 * cp,
        dp_shard=8 // cp,
        cp=cp,
        levers=_TITAN_LEVERS,
        rotate_method="allgather",
        layout="headtail",
        repeated_kv=True,
        float8=True,
        compiled=True,
    )


def _titan_405b(cp: int) -> Run:
    shape = _LLAMA3["405B"]
    return replace(_titan_8b(cp), shape=shape, local_batch=8, tp=8, pp=8, async_tp=True)


_8B_8K = Run(_LLAMA3["8B"], 8192, local_batch=2, dp_shard=8, levers=_SELECTIVE, compiled=True)
_70B_8K = Run(
    _LLAMA3["70B"],
    8192,
    local_batch=16,
    dp_shard=32,
    tp=8,
    levers=_TITAN_LEVERS,
    float8=True,
    compiled=True,
)
# torchtitan of that date made as many microbatches as there are stages: 4 sequences each.
_405B_8K = replace(_titan_405b(1), seq_len=8192, local_batch=32, pp_microbatch=4)
_ALST = Levers(checkpointing="full", recompute_attention=True, loss_chunk_tokens=2048)
_ALST_OFFLOAD = replace(_ALST, offload_checkpoints=True)


def _titan(
    name: str, run: Run, throughput: float, reserved_gib: float, remark: str = "", fit: bool = False
) -> Published:
    return Published(
        name, TITAN, "h100-96", run, throughput, "tok/s/GPU", reserved_gib, remark, fit
    )


_UNEXPLAINED_70B = (
    "Miss: 16 to 20 GiB more than states, checkpoints and logits of these shapes take; the report "
    "has no breakdown"
)
_SLOW_ATTENTION = (
    "Miss: CP 4 and CP 8 ran 1.25 and 1.30 times slower than FlashAttention-2 at 5/7 of its rate; "
    "the report has no trace that says why"
)

PUBLISHED: tuple[Published, ...] = (
    _titan("8B 8K, 8 GPUs", _8B_8K, 6667, 77.0, fit=True),
    _titan("8B 8K, 8 GPUs, Float8", replace(_8B_8K, float8=True), 8532, 76.8, fit=True),
    _titan("8B 8K, 8 GPUs, not compiled", replace(_8B_8K, compiled=False), 5762, 82.4),
    _titan("8B 8K, 128 GPUs", replace(_8B_8K, dp_shard=128), 6514, 62.0),
    _titan("8B 8K, 128 GPUs, Float8", replace(_8B_8K, dp_shard=128, float8=True), 8380, 61.8),
    _titan("70B 8K, 256 GPUs, TP 8, Float8", _70B_8K, 829, 71.9, _UNEXPLAINED_70B),
    _titan(
        "70B 8K, 256 GPUs, async TP 8, Float8",
        replace(_70B_8K, async_tp=True),
        876,
        67.6,
        _UNEXPLAINED_70B,
    ),
    _titan("405B 8K, 512 GPUs, TP 8 PP 8, 1F1B", _405B_8K, 100, 82.5),
    _titan(
        "405B 8K, 512 GPUs, TP 8 PP 8, interleaved",
        replace(_405B_8K, pp_schedule="Interleaved1F1B", virtual_stages=2),
        128,
        72.7,
    ),
    *(
        _titan(f"8B {32 * cp}K, 8 GPUs, CP {cp}, Float8", _titan_8b(cp), reported, memory, remark)
        for cp, reported, memory, remark in (
            (1, 3890, 83.9, ""),
            (2, 2540, 84.2, ""),
            (4, 1071, 84.0, ""),
            (8, 548, 84.5, _SLOW_ATTENTION),
        )
    ),
    *(
        _titan(f"405B {32 * cp}K, 512 GPUs, TP 8 PP 8 CP {cp}", _titan_405b(cp), reported, memory)
        for cp, reported, memory in ((1, 76, 75.3), (2, 47, 75.9), (4, 31, 77.1), (8, 16, 84.9))
    ),
    *(
        Published(
            f"Qwen3-{flavor} {millions}M, {cp} GPUs, CP {cp}",
            TRL,
            "h100",
            Run(
                QWEN3.flavors[flavor],
                2**20 * millions,
                cp=cp,
                levers=_ALST_OFFLOAD,
                kernel="cudnn",
                rotate_method="allgather",
                layout="headtail",
            ),
            seconds,
            "s/step",
            reserved,
            remark,
        )
        for flavor, millions, cp, seconds, reserved, remark in (
            (
                *("8B", 1, 8, 380, 56.2e9 / GIB),
                "Assumed: float32 master weights, as its 123 GB a checkpoint suggest; other "
                "revisions report 364 and 373 s",
            ),
            ("8B", 2, 16, 696, None, ""),
            ("8B", 4, 32, 1346, None, ""),
            ("0.6B", 1, 8, 137, None, ""),
        )
    ),
    *(
        Published(
            f"8B {millions}M, 8 GPUs, Ulysses 8",
            ALST,
            "h100",
            Run(_LLAMA3["8B"], round(millions * 1e6), cp=8, ulysses=8, levers=levers),
            seconds,
            "s/step",
            remark="Optimizer on the host, memory not reported",
        )
        for millions, levers, seconds in (
            (1.1, _ALST, 9 * 60 + 24),
            (2.4, _ALST_OFFLOAD, 43 * 60 + 30),
        )
    ),
    Published(
        "405B 128K, 16384 GPUs, TP 8 CP 16 PP 16",
        HERD,
        "h100",
        Run(
            _LLAMA3["405B"],
            131072,
            local_batch=16,
            dp_shard=8,
            cp=16,
            tp=8,
            pp=16,
            pp_schedule="Interleaved1F1B",
            virtual_stages=8,
            levers=Levers(checkpointing="none", loss_chunk_tokens=0),
            rotate_method="allgather",
            layout="headtail",
        ),
        380,
        "causal TFLOPS on H100",
        remark="Assumed: one layer a stage, FlashAttention-2, no checkpointing, causal FLOPs",
    ),
)


def table() -> str:
    """The comparison as a Markdown table."""
    lines = [
        "| run | source | GiB | predicted | error | throughput | predicted | error | remark |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for point in PUBLISHED:
        speed = point.predicted_throughput()
        cells = ["fit: " + point.name if point.fit else point.name, point.source.split(",")[0]]
        if point.reserved_gib is None:
            cells += ["-", "-", "-"]
        else:
            gib = point.predicted_gib()
            error = gib / point.reserved_gib - 1
            cells += [f"{point.reserved_gib:.1f}", f"{gib:.1f}", f"{error:+.0%}"]
        cells += [f"{point.throughput:g} {point.unit}", f"{speed:.4g}"]
        cells += [f"{speed / point.throughput - 1:+.0%}", point.remark]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
