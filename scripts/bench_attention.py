r"""Layouts of ring attention side by side: time, efficiency and memory, forward and backward.

    # two gloo ranks on this machine's CPU (add --device cuda for NCCL)
    python scripts/bench_attention.py --mode distributed --world-size 2 --seq-len 16384

    # the same under torchrun
    torchrun --nproc_per_node 2 scripts/bench_attention.py --mode distributed --seq-len 16384

    # every tile of an 8-rank ring, on one device; two packed documents
    python scripts/bench_attention.py --mode virtual --world-size 8 --seq-len 65536 \
        --heads 1 --kv-heads 1 --head-dim 128 --documents 49152,16384

    # whole training steps through train.py instead of attention alone; settings for it after --
    python scripts/bench_attention.py --end-to-end train_configs/debug_cpu.toml --world-size 2 \
        --seq-len 16384 --repeats 3 -- --documents.no_mask --rope.extrapolate

In virtual mode the time of a ring is the sum over its steps of the slowest rank. The ideal, timed
in the same run, is the kernel on the whole sequence on one device, divided by the number of ranks:
on all ranks at once, as the ring computes, and (`alone`) on one while the others wait. On the CPU
every rank has one thread. Lists of world sizes and lengths measure every combination.
"""

from __future__ import annotations

import argparse
import os
import sys
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

from arguments import positive, positives

if TYPE_CHECKING:
    from bench.report import Row

# The modules that measure are imported where they are used: --help is not to wait for torch.

# Options that describe one attention call, which a training job describes in its TOML.
ONE_CALL = (
    *("device", "batch", "heads", "kv_heads", "head_dim", "dtype"),
    *("documents", "window", "kernel", "rotate_method", "ulysses"),
)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mode", choices=["distributed", "virtual"], default="virtual")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument(
        "--world-size", type=positives, help="P, or a list 2,4; default 2, or torchrun's"
    )
    parser.add_argument("--seq-len", type=positives, default=(16384,), help="S, or a list")
    parser.add_argument("--batch", type=positive, default=1)
    parser.add_argument("--heads", type=positive, default=8)
    parser.add_argument("--kv-heads", type=positive, default=2)
    parser.add_argument("--head-dim", type=positive, default=64)
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], default="float32")
    parser.add_argument(
        "--layouts", default="striped,headtail,contiguous", help="also striped:BLOCK_SIZE"
    )
    parser.add_argument("--documents", type=positives, help="lengths that sum to S, 300,212")
    parser.add_argument(
        "--window", type=positive, help="tokens that a token sees, itself included; default: all"
    )
    parser.add_argument("--kernel", default="auto", help="of striped_cp.kernels, or auto")
    parser.add_argument("--rotate-method", choices=["ring", "allgather"], default="ring")
    parser.add_argument(
        "--ulysses", type=positive, default=1, help="of the ranks, how many share heads"
    )
    parser.add_argument("--repeats", type=positive, default=5)
    parser.add_argument(
        "--end-to-end", type=Path, metavar="TOML", help="measure tokens/s of train.py with this job"
    )
    parser.add_argument("settings", nargs="*", help="with --end-to-end: the job's settings")
    parser.add_argument("--json", type=Path, metavar="FILE", help="one row per layout")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="a PNG; needs matplotlib")
    arguments = parser.parse_args()
    if arguments.settings and not arguments.end_to_end:
        parser.error(f"unrecognized arguments: {' '.join(arguments.settings)}")
    for name in (*ONE_CALL, "mode", "plot") if arguments.end_to_end else ():
        if getattr(arguments, name) != parser.get_default(name):
            option = name.replace("_", "-")
            parser.error(f"--{option} does not apply to --end-to-end: the job's TOML decides")
    return arguments


def world_sizes(arguments: argparse.Namespace) -> tuple[int, ...]:
    if "RANK" not in os.environ:
        return arguments.world_size or (2,)
    size = int(os.environ["WORLD_SIZE"])
    if arguments.mode != "distributed" or arguments.world_size not in (None, (size,)):
        raise ValueError(
            f"under torchrun only --mode distributed with --world-size {size}, torchrun's, works"
        )
    return (size,)


def measure_attention(arguments: argparse.Namespace) -> list[Row]:
    import torch.distributed as dist
    from bench import distributed, virtual
    from bench.case import Case
    from bench.report import rows_of

    from striped_cp.layout import layout_from_spec

    layouts = {name: layout_from_spec(name) for name in arguments.layouts.split(",")}
    cases = [
        Case(
            world_size=world_size,
            seq_len=seq_len,
            **{name: getattr(arguments, name) for name in ONE_CALL},
        )
        for world_size, seq_len in product(world_sizes(arguments), arguments.seq_len)
    ]
    for case in cases:
        case.check(layouts.values())
    measure = (distributed if arguments.mode == "distributed" else virtual).measure
    rows: list[Row] = []
    for case in cases:
        samples = measure(case, layouts, arguments.repeats)
        if samples is not None:
            rows += rows_of(case, arguments.mode, samples)
    if distributed.under_torchrun():
        dist.destroy_process_group()
    return rows


def measure_training(arguments: argparse.Namespace) -> list[Row]:
    from bench import end_to_end

    from striped_cp.layout import layout_from_spec

    layouts = arguments.layouts.split(",")
    for layout in layouts:
        layout_from_spec(layout)
    rows: list[Row] = []
    for world_size, seq_len in product(arguments.world_size or (2,), arguments.seq_len):
        rows += end_to_end.measure(
            world_size,
            seq_len,
            layouts,
            arguments.repeats,
            arguments.end_to_end,
            arguments.settings,
        )
    return rows


def main() -> None:
    arguments = parse_arguments()
    from bench.end_to_end import table as training_table
    from bench.plot import plot, require_matplotlib
    from bench.report import table, write_json

    if arguments.plot:
        require_matplotlib()
    if arguments.end_to_end:
        rows = measure_training(arguments)
        print(training_table(rows))
    else:
        rows = measure_attention(arguments)
        if not rows:
            return  # a rank of torchrun other than the first
        print(table(rows))
    if arguments.json:
        write_json(arguments.json, rows)
    if arguments.plot:
        plot(arguments.plot, rows)


if __name__ == "__main__":
    try:
        main()
    except ValueError as error:
        print(f"bench_attention.py: {error}", file=sys.stderr)
        sys.exit(2)
