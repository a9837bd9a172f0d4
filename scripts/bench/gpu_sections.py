"""The sections of scripts/gpu_check.py: each yields what it found, row by row.

A section runs in a process of its own, so that one that hangs, or leaves the GPU in an error, costs
its own time only. The first six need torch alone.
"""

from __future__ import annotations

import platform
import statistics
import tempfile
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _coalescing_manager
from torch.utils.checkpoint import checkpoint

from striped_cp.kernels import KERNELS, Request
from striped_cp.layout import layout_from_spec
from striped_cp.selection import TOLERANCE, kernel_errors

from . import virtual
from .case import DTYPES, Case
from .measure import Yardsticks, peak_memory, wall_clock
from .report import Row, rows_of
from .training import train

DENSE = ("flash", "cudnn", "fa3", "fa4")
CHECKPOINTS = ("--activation_checkpoint.mode", "full")
LEVERS: dict[str, tuple[str, ...]] = {
    "none": ("--memory.loss_chunk_tokens", "0"),
    "loss in chunks": (),
    "+ checkpoints, attention kept": CHECKPOINTS,
    "+ MLP in chunks": (*CHECKPOINTS, "--memory.mlp_chunk_tokens", "2048"),
    "+ checkpoints offloaded": (
        *CHECKPOINTS,
        *("--memory.mlp_chunk_tokens", "2048", "--memory.offload_checkpoints"),
    ),
}


@dataclass(frozen=True)
class Sizes:
    """How much of everything.

    Attributes:
        kernels: those looked at wherever they can serve.
        timed_rows: of causal tiles.
        sequence: S and P of the packed case: one document of S/2 and 500 short ones.
        rings: (P, S/P, repeats).
        offloaded: rows and width of the offloaded blocks.
    """

    device: str
    dtype: str
    kernels: tuple[str, ...]
    heads: int
    kv_heads: int
    head_dim: int
    checked_rows: int
    timed_rows: tuple[int, ...]
    sequence: tuple[int, int]
    hop_rows: int
    rings: tuple[tuple[int, int, int], ...]
    offloaded: tuple[int, int]
    recipe: str
    recipe_settings: tuple[str, ...]
    lever_seq_len: int

    def request(self, packed: bool) -> Request:
        return Request(self.device, DTYPES[self.dtype], self.head_dim, packed)

    def able(self, packed: bool) -> list[str]:
        return [k for k in self.kernels if KERNELS[k].refuse(self.request(packed)) is None]

    def case(self, kernel: str, world_size: int, seq_len: int) -> Case:
        return Case(
            device=self.device,
            world_size=world_size,
            seq_len=seq_len,
            batch=1,
            heads=self.heads,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            dtype=self.dtype,
            kernel=kernel,
        )


GPU = Sizes(
    device="cuda",
    dtype="bfloat16",
    kernels=DENSE,
    heads=32,
    kv_heads=8,
    head_dim=128,
    checked_rows=1024,
    timed_rows=(16384, 65536),
    sequence=(2**20, 8),
    hop_rows=16384,
    rings=((8, 16384, 3), (8, 32768, 2), (16, 16384, 2), (32, 16384, 1)),
    offloaded=(131072, 4096),
    recipe="train_configs/debug_gpu.toml",
    recipe_settings=("--training.steps", "20"),
    lever_seq_len=131072,
)
DRY_RUN = Sizes(
    device="cpu",
    dtype="float32",
    kernels=("cpu",),
    heads=8,
    kv_heads=2,
    head_dim=16,
    checked_rows=48,
    timed_rows=(128, 256),
    sequence=(4096, 8),
    hop_rows=256,
    rings=((2, 64, 1),),
    offloaded=(256, 64),
    recipe="train_configs/debug_cpu.toml",
    recipe_settings=("--training.steps", "2", "--training.seq_len", "128"),
    lever_seq_len=256,
)
SIZES = {sizes.device: sizes for sizes in (GPU, DRY_RUN)}


def environment(device: str) -> Row:
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if device == "cuda" else platform.machine(),
        "cuda": torch.version.cuda,
        "dry_run": device == "cpu",
    }


def correctness(sizes: Sizes) -> Iterator[Row]:
    """Largest errors of every kernel, in rings of four, forward and backward."""
    for packed in (False, True):
        for kernel in sizes.kernels:
            refused = KERNELS[kernel].refuse(sizes.request(packed))
            if refused is not None:
                yield {"kernel": kernel, "packed": packed, "refused": refused}
                continue
            for layout in ("striped", "headtail", "striped:16"):
                yield _errors(sizes, kernel, layout, packed)
            for layout in ("striped", "contiguous"):
                yield _errors(sizes, kernel, layout, packed, window=sizes.checked_rows)


def _errors(sizes: Sizes, kernel: str, layout: str, packed: bool, window: int | None = None) -> Row:
    errors = kernel_errors(
        KERNELS[kernel],
        sizes.request(packed),
        layout_from_spec(layout),
        packed,
        heads=sizes.heads,
        kv_heads=sizes.kv_heads,
        rows=sizes.checked_rows,
        world_size=4,
        window=window,
    )
    # Not "any too large": a NaN must fail.
    ok = all(error <= TOLERANCE[DTYPES[sizes.dtype]] for error in errors.values())
    case = {"kernel": kernel, "layout": layout, "packed": packed, "window": window}
    return {**case, "errors": errors, "ok": ok}


def rates(sizes: Sizes) -> Iterator[Row]:
    """TFLOP/s of causal tiles, the causal half counted, 2.5 times the forward for the backward."""
    for rows in sizes.timed_rows:
        for kernel in sizes.able(packed=False):
            yield _rates(sizes, kernel, rows)


def _rates(sizes: Sizes, kernel: str, rows: int) -> Row:
    yardsticks = Yardsticks(sizes.case(kernel, 1, rows), wall_clock(sizes.device))
    timings = [yardsticks.ideal() for _ in range(4)][1:]
    tera = 4 * (rows**2 / 2) * sizes.heads * sizes.head_dim / 1e12
    return {
        "kernel": kernel,
        "rows": rows,
        "forward_tflops": tera / statistics.median(t.forward for t in timings),
        "backward_tflops": 2.5 * tera / statistics.median(t.backward for t in timings),
    }


def documents(sizes: Sizes) -> Iterator[Row]:
    """One long document and 500 short ones: all tiles of one rank, their time and memory."""
    seq_len, world_size = sizes.sequence
    short, rest = divmod(seq_len - seq_len // 2, 500)
    lengths = (seq_len // 2, *[short] * 499, short + rest)
    pairs = sum(n * (n + 1) / 2 for n in lengths) / world_size
    tera = 3.5 * 4 * pairs * sizes.heads * sizes.head_dim / 1e12
    for kernel in sizes.able(packed=True):
        case = replace(sizes.case(kernel, world_size, seq_len), documents=lengths)
        rank = virtual.VirtualRank(case, layout_from_spec("striped"), world_size // 2)
        peak = peak_memory(sizes.device, rank.run)
        forward, backward = rank.run()
        seconds = sum(forward + backward)
        yield {
            "kernel": kernel,
            "seq_len": seq_len,
            "world_size": world_size,
            "documents": len(lengths),
            "forward_s": sum(forward),
            "backward_s": sum(backward),
            "tflops": tera / seconds,
            "peak_bytes": peak,
        }


def hops(sizes: Sizes) -> Iterator[Row]:
    """Keys and values sent to this GPU itself beside a kernel: what of a hop is not hidden."""
    # The dry run's backend moves nothing.
    backend = "nccl" if sizes.device == "cuda" else "fake"
    store: dist.Store = dist.FileStore(f"{tempfile.mkdtemp()}/store", 1)
    if backend == "fake":
        from torch.testing._internal.distributed.fake_pg import FakeStore

        store = FakeStore()
    dist.init_process_group(backend, store=store, rank=0, world_size=1)
    kernel = sizes.able(packed=False)[0]
    yardsticks = Yardsticks(sizes.case(kernel, 1, sizes.hop_rows), wall_clock(sizes.device))
    sent = [x.transpose(1, 2).contiguous() for x in yardsticks.tensors[1:3]]
    received = [torch.zeros_like(x) for x in sent]
    for high_priority in (False, True):
        options = None
        if backend == "nccl":
            options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=high_priority)
        group = dist.new_group([0], pg_options=options)
        hop = partial(_post_hop, group, sent, received)
        runs: dict[str, Callable[[], object]] = {
            "kernel": yardsticks.causal_tile,
            "hop": partial(_beside, hop, lambda: None),
            "both": partial(_beside, hop, yardsticks.causal_tile),
        }
        rounds = [{name: _timed(sizes, run) for name, run in runs.items()} for _ in range(4)]
        arrived = all(torch.equal(a, b) for a, b in zip(sent, received, strict=True))
        yield {
            "high_priority": high_priority,
            "nbytes": sum(x.nbytes for x in sent),
            "arrived": arrived,
            **{f"{name}_s": statistics.median(r[name] for r in rounds[1:]) for name in runs},
            "ok": arrived or backend == "fake",
        }


def _post_hop(group: dist.ProcessGroup, sent: list[Tensor], received: list[Tensor]) -> Any:
    """To itself, which torch's own calls refuse and NCCL does."""
    with _coalescing_manager(group, sent[0].device, async_ops=True) as work:
        for x in sent:
            group.send([x], 0, 0)
        for x in received:
            group.recv([x], 0, 0)
    return work


def _beside(hop: Callable[[], Any], kernel: Callable[[], object]) -> None:
    pending = hop()
    kernel()
    pending.wait()


def _timed(sizes: Sizes, run: Callable[[], object]) -> float:
    now = wall_clock(sizes.device)
    started = now()
    run()
    return now() - started


def offload(sizes: Sizes) -> Iterator[Row]:
    """Four checkpointed blocks whose inputs wait on the device, or in host memory."""
    from recipes.memory.offload import CheckpointOffload

    rows, width = sizes.offloaded
    generator = torch.Generator(sizes.device).manual_seed(0)

    def random(count: int) -> Tensor:
        x = torch.randn(count, width, generator=generator, device=sizes.device)
        return x.to(DTYPES[sizes.dtype])

    weight = random(width) / width**0.5
    x = random(rows).requires_grad_()

    def block(y: Tensor) -> Tensor:
        for _ in range(8):
            y = y @ weight
        return y

    def step(offload: CheckpointOffload | None) -> Tensor:
        y = x
        if offload:
            offload.start()
        for _ in range(4):
            with offload.block(y) if offload else nullcontext():
                y = checkpoint(block, y, use_reentrant=False)
        return torch.autograd.grad(y.sum(), x)[0]

    want = step(None)
    for offloaded in (False, True):
        run = partial(step, CheckpointOffload() if offloaded else None)
        peak = peak_memory(sizes.device, run)
        seconds = [_timed(sizes, run) for _ in range(3)]
        yield {
            "offloaded": offloaded,
            "seconds": statistics.median(seconds),
            "peak_bytes": peak,
            "block_bytes": x.nbytes,
            "ok": torch.equal(run(), want),
        }


def flex(sizes: Sizes) -> Iterator[Row]:
    refused = KERNELS["flex"].refuse(sizes.request(True))
    if refused is not None:
        yield {"refused": refused}
        return
    yield _errors(sizes, "flex", "striped", packed=True)
    yield _rates(sizes, "flex", sizes.timed_rows[0])


def rings(sizes: Sizes) -> Iterator[Row]:
    """Every tile of larger rings, three layouts, with and without documents."""
    layouts = {name: layout_from_spec(name) for name in ("striped", "headtail", "contiguous")}
    # Fewer heads: the ratios are the same.
    small = replace(sizes, heads=8, kv_heads=2)
    for world_size, local, repeats in sizes.rings:
        seq_len = world_size * local
        for lengths in (None, (seq_len * 3 // 4, seq_len // 4)):
            case = replace(small.case("auto", world_size, seq_len), documents=lengths)
            yield from rows_of(case, "virtual", virtual.measure(case, layouts, repeats))


def recipe(sizes: Sizes) -> Iterator[Row]:
    yield train(sizes.recipe, 1, *sizes.recipe_settings)


def levers(sizes: Sizes) -> Iterator[Row]:
    """Peak memory of a long training step as the memory levers come on."""
    for name, settings in LEVERS.items():
        size = ("--training.seq_len", str(sizes.lever_seq_len), "--training.local_batch_size", "1")
        steps = ("--training.steps", "3", "--documents.no_mask")
        summary = train(sizes.recipe, 1, *size, *steps, *settings)
        yield {"levers": name, "seq_len": sizes.lever_seq_len, **summary}


SECTIONS: dict[str, Callable[[Sizes], Iterator[Row]]] = {
    section.__name__: section
    for section in (correctness, rates, documents, hops, offload, flex, rings, recipe, levers)
}
