"""Measure how a model uses long contexts, on any number of ranks.

    python scripts/evaluate.py --job.config_file X.toml --parallelism.context_parallel_degree 1
    torchrun --nproc_per_node 8 scripts/evaluate.py --job.config_file X.toml
    torchrun --nproc_per_node 8 scripts/evaluate.py --initial --job.config_file X.toml

The recipe of the run, its last checkpoint (`--checkpoint.load_step N` for another), or with
`--initial` the weights it started from. `[evaluation]` says what is measured; `--section.key value`
overrides the TOML, as for train.py; `--debug` shows where an error came from.
docs/reference/evaluation.md describes the measures and the files.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# A checkpoint folder that never exists: torchtitan then loads what the run starts from.
_NO_CHECKPOINTS = "evaluation/no-checkpoints"


def main(argv: list[str]) -> None:
    if {"--help", "-h"} & set(argv):
        print(__doc__, end="")
        return
    sys.path.insert(0, str(ROOT))
    if "RANK" not in os.environ:
        be_alone()
    # After the arguments: these imports take seconds.
    from recipes.launch import refuse
    from recipes.preflight import load_config
    from recipes.preflight.evaluation import check_has_weights
    from recipes.process.quiet import quieten

    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    try:
        config = load_config(arguments(argv), world_size)
        check_has_weights(config)
    except ValueError as error:
        refuse(str(error), rank)
    quieten(config, rank, world_size)

    import torch.distributed as dist

    from recipes.process import faults
    from recipes.train.evaluate import evaluate

    try:
        evaluate(config)
    except Exception as error:
        faults.leave(error, rank, "--debug" in argv)
    dist.destroy_process_group()


def arguments(argv: list[str]) -> list[str]:
    """The user's, and what makes a run of them that only loads and measures."""
    initial = ["--checkpoint.folder", _NO_CHECKPOINTS] if "--initial" in argv else []
    return [
        *(arg for arg in argv if arg not in ("--initial", "--debug")),
        *("--checkpoint.enable", "--checkpoint.load_only", "--checkpoint.no-last_save_in_hf"),
        *("--checkpoint.exclude_from_loading", "optimizer,lr_scheduler,dataloader,train_state"),
        *("--evaluation.enable", "--validation.no-enable", "--profiling.no-enable_profiling"),
        *("--metrics.no-enable_tensorboard", "--metrics.no-enable_wandb"),
        *initial,
    ]


def be_alone() -> None:
    """What torchrun sets, for one process without it."""
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "0"}  # any that is free


if __name__ == "__main__":
    main(sys.argv[1:])
