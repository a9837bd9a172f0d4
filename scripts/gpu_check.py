"""What needs a GPU to be known, in one command: under 4 minutes, one GPU, no network.

    python scripts/gpu_check.py --json docs/results/gpu_check.json

1. correctness: every CUDA kernel path against plain attention in float32, forward and backward
2. rings: every tile of rings of 8, 16 and 32 ranks, three layouts, with and without documents
3. recipe: the debug model, end to end
4. levers: peak memory of a long training step as the memory levers come on

Needs torch 2.11 or later. A section that fails is reported and the others still run; the exit
status is then 1. `--device cpu` is a dry run of this script itself, with tiny sizes: it says
nothing about GPUs.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

# The modules that measure are imported where they are used: --help is not to wait for torch.

LAYOUTS = ("striped", "headtail", "contiguous")
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
        rings: (P, S/P, repeats).
        checked: kernels, of which those in `packed` take documents.
    """

    device: str
    dtype: str
    rows_checked: int
    checked: tuple[str, ...]
    packed: tuple[str, ...]
    rings: tuple[tuple[int, int, int], ...]
    heads: int
    head_dim: int
    recipe: str
    recipe_settings: tuple[str, ...]
    lever_seq_len: int


GPU = Sizes(
    device="cuda",
    dtype="bfloat16",
    rows_checked=2048,
    checked=("flash", "cudnn", "flex"),
    packed=("flash", "flex"),
    rings=((8, 16384, 3), (8, 32768, 2), (16, 16384, 2), (32, 16384, 1)),
    heads=8,
    head_dim=128,
    recipe="train_configs/debug_gpu.toml",
    recipe_settings=("--training.steps", "20"),
    lever_seq_len=131072,
)
DRY_RUN = Sizes(
    device="cpu",
    dtype="float32",
    rows_checked=64,
    checked=("cpu",),
    packed=("cpu",),
    rings=((2, 64, 1),),
    heads=8,
    head_dim=16,
    recipe="train_configs/debug_cpu.toml",
    recipe_settings=("--training.steps", "2", "--training.seq_len", "128"),
    lever_seq_len=256,
)


def environment(sizes: Sizes) -> dict[str, Any]:
    import torch

    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if sizes.device == "cuda" else platform.machine(),
        "cuda": torch.version.cuda,
        "dry_run": sizes is DRY_RUN,
    }


def correctness(sizes: Sizes) -> list[dict[str, Any]]:
    """Largest error of every kernel, layout and packing; raises if one is too large."""
    from bench.correctness import Check, check

    from striped_cp.layout import layout_from_spec

    checks = [
        Check(kernel, layout, packed, sizes.dtype, heads, kv_heads, sizes.rows_checked)
        for kernel in sizes.checked
        for layout in map(layout_from_spec, (*LAYOUTS, "striped:16"))
        for packed in ((False, True) if kernel in sizes.packed else (False,))
        for heads, kv_heads in ((4, 4), (8, 2))
    ]
    results = [check(one, sizes.device) for one in checks]
    for result in results:
        what = (f"{key} {value}" for key, value in result.items() if key not in ("errors", "ok"))
        print(*what, f"largest error {max(result['errors'].values()):.1e}", sep=", ")
    wrong = [result for result in results if not result["ok"]]
    if wrong:
        raise AssertionError(f"{len(wrong)} of {len(results)} results are wrong: {wrong}")
    return results


def rings(sizes: Sizes) -> list[dict[str, Any]]:
    from bench import virtual
    from bench.case import Case
    from bench.report import rows_of, table

    from striped_cp.layout import layout_from_spec

    layouts = {name: layout_from_spec(name) for name in LAYOUTS}
    rows = []
    for world_size, local, repeats in sizes.rings:
        seq_len = world_size * local
        for documents in (None, (seq_len * 3 // 4, seq_len // 4)):
            case = Case(
                device=sizes.device,
                world_size=world_size,
                seq_len=seq_len,
                batch=1,
                heads=sizes.heads,
                kv_heads=sizes.heads // 4,
                head_dim=sizes.head_dim,
                dtype=sizes.dtype,
                documents=documents,
                kernel="auto",
                rotate_method="ring",
            )
            rows += rows_of(case, "virtual", virtual.measure(case, layouts, repeats))
    print(table(rows))
    return rows


def recipe(sizes: Sizes) -> dict[str, Any]:
    from bench.training import train

    summary = train(sizes.recipe, 1, *sizes.recipe_settings)
    print(f"loss {summary['loss']:.4f}, {summary['tokens_per_second']:.0f} tokens/s")
    return summary


def levers(sizes: Sizes) -> list[dict[str, Any]]:
    from bench.training import train

    results = []
    for name, settings in LEVERS.items():
        size = ("--training.seq_len", str(sizes.lever_seq_len), "--training.local_batch_size", "1")
        steps = ("--training.steps", "3", "--documents.no_mask")
        summary = train(sizes.recipe, 1, *size, *steps, *settings)
        memory, speed = summary["peak_memory_gib"], summary["tokens_per_second"]
        print(f"{name}: {memory:.2f} GiB, {speed:.0f} tokens/s")
        results.append({"levers": name, "seq_len": sizes.lever_seq_len, **summary})
    return results


SECTIONS: tuple[Callable[[Sizes], Any], ...] = (environment, correctness, rings, recipe, levers)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    import torch

    if arguments.device == "cuda" and not torch.cuda.is_available():
        sys.exit("gpu_check.py: no CUDA device; --device cpu is a dry run with tiny sizes")
    sizes = GPU if arguments.device == "cuda" else DRY_RUN
    report: dict[str, Any] = {}
    failed = []
    for section in SECTIONS:
        name, started = section.__name__, time.perf_counter()
        print(f"== {name}", flush=True)
        try:
            report[name] = section(sizes)
        except Exception:
            failed.append(name)
            report[name] = {"failed": traceback.format_exc()}
            traceback.print_exc()
        print(f"   {time.perf_counter() - started:.1f} s", flush=True)
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")
    print("failed: " + ", ".join(failed) if failed else "all sections passed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
