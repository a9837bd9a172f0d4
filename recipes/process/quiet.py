"""What a run prints: one rank's log, and no warning that its user can do nothing about."""

import logging
import os
import sys
import warnings

from recipes.config.schema import StripedJobConfig
from recipes.titan import init_logger, logger

# Warnings of torch 2.13, torchdata 0.11 and torchtitan 0.2.2 about themselves: beginning, and why
# nobody needs to see it.
_KNOWN_WARNINGS = {
    "'set_vital' is deprecated": "torchdata calls it",
    "DTensor random operators may not": "cpu_host.init_weights_as_one draws none from DTensor",
    "DTensor manual_seed\\(\\) may not": "likewise",
    "Set timeout is now only supported": "torchtitan makes an idle group for experts it has not",
    "FSDP2-wrapped module \\(FSDPEmbedding\\)": "nothing changes the embedding's output in place",
    "In CPU autocast, but the target dtype": "float32 is what mixed_precision_param asked for",
}


def quieten(config: StripedJobConfig, rank: int, world_size: int) -> None:
    """Let the rank that knows the loss log to the console, and the others only errors.

    That is rank 0, or the first rank of the last pipeline stage. As in torchtitan, LOG_RANK names
    other ranks to hear.
    """
    pp = config.parallelism.pipeline_parallel_degree
    backwards = config.parallelism.pipeline_parallel_schedule == "ZBVZeroBubble"
    loss_rank = 0 if backwards else world_size // pp * (pp - 1)
    os.environ.setdefault("LOG_RANK", str(loss_rank))
    init_logger()
    if str(rank) not in os.environ["LOG_RANK"].split(","):
        logger.setLevel(logging.ERROR)
    if not sys.stderr.isatty():  # a file, or a pipe
        config.metrics.disable_color_printing = True
    for message in _KNOWN_WARNINGS:
        warnings.filterwarnings("ignore", message=message, category=UserWarning)
    # torchrun sets it, torchtitan sets it to its own value and warns that it does.
    os.environ.pop("TORCH_NCCL_ASYNC_ERROR_HANDLING", None)
