"""Checks of this host: can the run write where it has to, is there room, are there the tools.

Raises `InvalidSetting` like `recipes.preflight.checks`, which calls this.
"""

from __future__ import annotations

import errno
import importlib.util
import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from recipes.config.schema import StripedJobConfig
from recipes.config.types import InvalidSetting
from recipes.config.values import get
from recipes.models.registry import shape_of

if TYPE_CHECKING:
    from striped_cp.kernels.base import Request

_GB = 1e9
_NAME_BYTES = 255  # of one name in a folder, on the file systems of Linux
# What needs an accelerator: value, why, and what is allowed without one.
_GPU_ONLY = {
    "profiling.enable_memory_snapshot": (True, "the memory of a GPU is recorded", "false"),
    "checkpoint.async_mode": (
        "async_with_pinned_mem",
        "memory is pinned for a GPU",
        '"disabled", "async"',
    ),
}


def check_host(config: StripedJobConfig) -> None:
    """Check folder, room and tools that a run needs."""
    if config.metrics.enable_wandb and importlib.util.find_spec("wandb") is None:
        why = "wandb is not installed"
        raise InvalidSetting("metrics.enable_wandb", True, why, "false, or pip install wandb")
    for key, (value, why, allowed) in _GPU_ONLY.items():
        if get(config, key) == value:
            # Imported late: it imports torch.
            from recipes.titan.cpu_host import is_cpu_host

            if is_cpu_host():
                raise InvalidSetting(key, value, f"{why}, this host has none", allowed)
    if uses_ring(config):
        _check_kernel(config)
    dump_folder = config.job.dump_folder
    existing = _check_writable("job.dump_folder", dump_folder, Path(dump_folder))
    saves = config.checkpoint.enable and not config.checkpoint.load_only
    for key, used in (
        ("checkpoint.folder", saves),
        ("metrics.save_tb_folder", config.metrics.enable_tensorboard),
        ("profiling.save_traces_folder", config.profiling.enable_profiling),
        ("profiling.save_memory_snapshot_folder", config.profiling.enable_memory_snapshot),
        ("comm.save_traces_folder", config.comm.trace_buf_size > 0),
    ):
        if used:
            _check_writable(key, get(config, key), Path(dump_folder, get(config, key)))
    if config.evaluation.enable:
        folder = Path(dump_folder, "evaluation")
        _check_writable("job.dump_folder", str(folder), folder)
    if saves:
        _check_room(config, existing)


def _check_writable(key: str, value: str, folder: Path) -> Path:
    """Check that the folder can be made and written to; returns the part of it that exists."""
    existing = folder.absolute()
    try:
        if "\0" in value:
            raise ValueError("it has a null byte")
        if max(len(os.fsencode(part)) for part in existing.parts) > _NAME_BYTES:
            raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG))
        while not existing.exists():
            existing = existing.parent
        with tempfile.TemporaryFile(dir=existing) as file:
            file.write(b"0")
    except (OSError, ValueError) as error:
        why = f"cannot be written to ({getattr(error, 'strerror', None) or error})"
        allowed = "a folder that every rank can write to"
        raise InvalidSetting(key, value, why, allowed) from None
    return existing


def _check_room(config: StripedJobConfig, folder: Path) -> None:
    # Weights and Adam's two moments in training.dtype.
    per_value = 2 if config.training.dtype == "bfloat16" else 4
    needed, free = 3 * per_value * shape_of(config).parameters, shutil.disk_usage(folder).free
    if free < needed:
        why = f"a checkpoint takes {needed / _GB:.3g} GB, {folder} has {free / _GB:.3g} GB of room"
        allowed = "a folder with room, or checkpoint.enable = false"
        raise InvalidSetting("job.dump_folder", config.job.dump_folder, why, allowed)


def uses_ring(config: StripedJobConfig) -> bool:
    """Whether attention is this project's; torch's own serves one rank with one document."""
    own = config.striped_cp.kernel != "auto" or shape_of(config).windowed
    return own or config.documents.mask or config.parallelism.context_parallel_degree > 1


def kernel_request(config: StripedJobConfig) -> Request:
    """What the run asks of its attention kernel."""
    # Imported late: they import torch.
    import torch

    from recipes.titan.cpu_host import is_cpu_host
    from striped_cp.kernels.base import Request

    return Request(
        "cpu" if is_cpu_host() else "cuda",
        getattr(torch, config.training.mixed_precision_param),
        shape_of(config).head_dim,
        config.documents.mask,
    )


def _check_kernel(config: StripedJobConfig) -> None:
    """Check, without measuring, that a kernel can serve the run on this host."""
    # Imported late: it imports torch.
    from striped_cp.kernels import choose_kernel

    try:
        choose_kernel(config.striped_cp.kernel, kernel_request(config))
    except ValueError as error:
        why, _, able = str(error).partition(": ")[2].partition("; ")
        name = config.striped_cp.kernel
        allowed = able if name == "auto" else f'"auto", {able}'
        raise InvalidSetting("striped_cp.kernel", name, why, allowed) from None
