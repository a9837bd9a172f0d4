"""Will it fit, how fast, with which degrees: plans a training run without a GPU.

    python scripts/plan.py train_configs/llama3_8b_1m.toml --gpus 8 --gpu h100
    python scripts/plan.py X.toml --gpus 64 --gpu h100 --search --write best.toml
    python scripts/plan.py X.toml --gpus 8 --gpu h100 --layout --documents 98304,32768
    python scripts/plan.py X.toml --gpus 8 --gpu h100 --data prepared/books

The TOML is read as training reads it; `--section.key value` overrides it likewise.
docs/reference/planner.md says what is modelled and how far it can be trusted.
"""

from __future__ import annotations

import argparse
import json
import shlex
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from recipes.planner.plan import Plan

ROOT = Path(__file__).resolve().parent.parent


def main(argv: list[str]) -> int:
    args, overrides = parser().parse_known_args(argv)
    sys.path.insert(0, str(ROOT))
    try:
        text, fits = report(args, overrides)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    print(text)
    return 0 if fits else 1


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Plan a training run: memory, speed, degrees.",
        epilog="--section.key value overrides the TOML, as for train.py. Exit status: 0 it fits, "
        "1 it does not, 2 it cannot run as written.",
        allow_abbrev=False,
    )
    parser.add_argument("config", help="TOML file of the run")
    parser.add_argument("--gpus", type=int, required=True, help="number of GPUs")
    parser.add_argument("--gpu", required=True, help="a100, h100, h100-96, h200, b200 or mi300x")
    parser.add_argument("--network", help="between nodes: eth100, ib200, ib400, efa400 or ib800")
    parser.add_argument("--documents", help="LEN,LEN,...: documents packed into every sequence")
    parser.add_argument(
        "--data",
        metavar="FOLDER",
        nargs="?",
        const="",
        help="prepared documents, packed as the run packs them; without FOLDER those of the TOML",
    )
    parser.add_argument("--layout", action="store_true", help="compare the layouts of the ring")
    parser.add_argument("--search", action="store_true", help="degrees and levers that fit, ranked")
    parser.add_argument("--write", metavar="X.toml", help="write the best of --search")
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


def report(args: argparse.Namespace, overrides: list[str]) -> tuple[str, bool]:
    """What to print, and whether the run fits.

    Raises:
        ValueError: one line for a setting that makes no sense.
    """
    from recipes.planner import report as text
    from recipes.planner.hardware import find_gpu, find_network_gb_s
    from recipes.planner.plan import make_plan
    from recipes.planner.settings import run_from_config, run_to_search
    from recipes.preflight import load_config

    if args.gpus < 1:
        raise ValueError(f"--gpus {args.gpus}: at least 1")
    if args.write and not args.search:
        raise ValueError("--write: writes the best plan of --search, which is not given")
    if args.documents and args.data is not None:
        raise ValueError("--documents: --data says how long they are; give one of the two")
    packed = "--documents" if args.documents else "--data" if args.data is not None else None
    if args.search and (args.layout or packed):
        other = "--layout" if args.layout else packed
        raise ValueError(f"{other}: --search has no use for it; give one of the two")
    gpu = find_gpu(args.gpu)
    network = find_network_gb_s(args.network or gpu.network)
    config = load_config(["--job.config_file", args.config, *overrides])
    if packed and not config.documents.mask:
        raise ValueError(
            f"{args.config}: documents.mask = false: attention computes across documents, and "
            f"{packed} would change nothing; allowed: documents.mask = true"
        )
    documents = document_lengths(args.documents)
    about_documents = None
    try:
        if args.data is not None:
            from recipes.planner.data import typical_documents

            documents, about_documents = typical_documents(config, args.data)
        if args.search:
            run, sequences = run_to_search(config, args.gpus, gpu)
        else:
            run = run_from_config(config, args.gpus, gpu, documents)
    except ValueError as error:
        raise ValueError(f"{args.config}: {error}") from None
    if args.layout:
        from recipes.planner import balance as layouts

        rows = layouts.compare_layouts(run, gpu, network)
        table = layouts.layouts_table(rows)
        return json.dumps(table) if args.json else layouts.layouts_text(rows), True
    if args.search:
        from recipes.planner.search import search

        # cuDNN takes no packed documents.
        names = ("flash",) if config.documents.mask else ("flash", "cudnn")
        kernels = tuple(name for name in names if name in gpu.kernels)
        plans = search(run, sequences, gpu, network, kernels)
        if not plans:
            raise ValueError(f"{args.config}: fits on no mesh of {args.gpus} x {gpu.name}")
        if args.write:
            write(args, overrides, config, plans[0])
            print(f"wrote {args.write}", file=sys.stderr)
        if args.json:
            return json.dumps([text.plan_table(plan) for plan in plans]), True
        return text.search_text(plans), True
    if run.documents or run.shape.windowed:
        from recipes.planner.balance import with_counted_pairs

        run = with_counted_pairs(run)
    plan = make_plan(run, gpu, network)
    if args.json:
        return json.dumps(text.plan_table(plan)), plan.fits
    advice = text.exposed_ring_text(plan, network), text.later_kernel_text(plan, network)
    return "\n".join([text.plan_text(plan), *filter(None, (*advice, about_documents))]), plan.fits


def document_lengths(text: str | None) -> tuple[int, ...]:
    """LEN,LEN,... as integers."""
    if text is None:
        return ()
    lengths = text.split(",")
    if not all(length.isdecimal() and int(length) > 0 for length in lengths):
        raise ValueError(f'--documents "{text}": positive lengths separated by commas')
    return tuple(map(int, lengths))


def write(args: argparse.Namespace, overrides: list[str], config: Any, plan: Plan) -> None:
    """Write the TOML file of `plan`: that of the command line, its overrides, then the plan."""
    from recipes.config.load import read_toml
    from recipes.planner.report import toml_text
    from recipes.planner.settings import settings_of

    table = read_toml(args.config)
    for key in override_keys(overrides):
        *path, name = key.split(".")
        section, values = table, config
        for part in path:
            section, values = section.setdefault(part, {}), getattr(values, part)
        name = name if hasattr(values, name) else name.removeprefix("no_")
        section[name] = getattr(values, name)
    for name, settings in settings_of(plan.run).items():
        table.setdefault(name, {}).update(settings)
    command = f"python scripts/plan.py {shlex.join(sys.argv[1:])}"
    try:
        with open(args.write, "x") as file:
            file.write(toml_text(table, command))
    except OSError as error:
        raise ValueError(f"--write {args.write}: {error.strerror}; a new file is allowed") from None


def override_keys(overrides: list[str]) -> list[str]:
    """Dotted keys that the command line sets."""
    names = (arg.partition("=")[0] for arg in overrides if arg.startswith("--"))
    return [name.removeprefix("--").replace("-", "_") for name in names if "." in name]


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # end quietly when a pager does
    sys.exit(main(sys.argv[1:]))
