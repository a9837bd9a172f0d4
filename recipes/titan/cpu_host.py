"""The one module that lets torchtitan 0.2.2 run on a host without an accelerator.

On a host with an accelerator nothing is changed. Everything here was found by running
torchtitan 0.2.2 with torch 2.13 on CPU; each function says what it is for.
"""

import contextlib
import functools
import importlib
import os
import re
import resource
import sys
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import TYPE_CHECKING
from unittest import mock

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

if TYPE_CHECKING:
    from torchtitan.protocols import ModelProtocol

_PROC_STATUS = "/proc/self/status"
_PROC_CLEAR_REFS = "/proc/self/clear_refs"
# What activation checkpointing and torch.compile add to the names of parameters.
_WRAPPER_NAMES = re.compile(r"_checkpoint_wrapped_module\.|_orig_mod\.")


def is_cpu_host() -> bool:
    """Whether torch sees no accelerator on this host."""
    return not torch.accelerator.is_available()


@contextlib.contextmanager
def chosen() -> Iterator[None]:
    """While torchtitan is imported: let it choose the CPU.

    `torchtitan.tools.utils` (0.2.2) asks torch for the device type once, at import, falls back to
    "cuda", and every other module copies its answer. The two torch functions it asks are replaced
    only meanwhile, so that torch itself keeps its own.
    """
    if not is_cpu_host():
        yield
        return
    with (
        mock.patch("torch._utils._get_available_device_type", return_value="cpu"),
        mock.patch("torch._utils._get_device_module", return_value=CpuDevice()),
    ):
        yield
        utils = importlib.import_module("torchtitan.tools.utils")
    # torchtitan 0.2.2 runs `lspci`, warns when it is missing, and assumes an A100 (312 TFLOPS).
    utils.get_peak_flops = lambda device_name: measured_peak_flops()  # type: ignore[attr-defined]
    profiling = importlib.import_module("torchtitan.tools.profiling")
    profiling.torch = TorchWithoutGpuProfiler()  # type: ignore[attr-defined]


def init_weights_as_one(model: nn.Module, build: Callable[[], "ModelProtocol"]) -> None:
    """Give a sharded model the weights that the same seed gives to one process.

    DTensor's random numbers (torch 2.13) need a device with a generator offset. On CPU every shard
    would draw the same numbers, and rows of the embedding would repeat. So each rank initializes
    the whole model and keeps its part.

    Args:
        build: makes the model whole; called under the meta device.
    """
    with torch.device("meta"):
        whole = build()
    whole.to_empty(device="cpu")
    whole.init_weights()
    for name, parameter in model.named_parameters():
        value = whole.get_parameter(_WRAPPER_NAMES.sub("", name))
        if isinstance(parameter, DTensor):
            mesh, placements = parameter.device_mesh, parameter.placements
            value = distribute_tensor(value, mesh, placements, src_data_rank=None)
        parameter.copy_(value)


class TorchWithoutGpuProfiler:
    """`torch` as torchtitan's profiler (0.2.2) needs it.

    On a host without a GPU it asks for the activities [CPU, None], which torch 2.13 refuses.
    """

    def __getattr__(self, name: str):
        return getattr(torch, name)

    class profiler:
        ProfilerActivity = torch.profiler.ProfilerActivity
        schedule = staticmethod(torch.profiler.schedule)

        @staticmethod
        def profile(activities: list, **settings):
            present = [activity for activity in activities if activity is not None]
            return torch.profiler.profile(activities=present, **settings)


class CpuDevice:
    """`torch.cpu` with the calls of `torch.cuda` that torchtitan's trainer and memory monitor make.

    The memory of a CPU "device" is this process's resident set: what a host runs out of.
    """

    def __getattr__(self, name: str):
        return getattr(torch.cpu, name)

    @staticmethod
    def current_device() -> int:
        """0 where `torch.cpu` says "cpu": `barrier(device_ids=...)` takes integers."""
        return 0

    @staticmethod
    def get_device_name(device: torch.device | None = None) -> str:
        return "CPU"

    @staticmethod
    def get_device_properties(device: torch.device | None = None) -> SimpleNamespace:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return SimpleNamespace(name="CPU", total_memory=total)

    @staticmethod
    def memory_stats(device: torch.device | None = None) -> dict[str, int]:
        peak = peak_resident_bytes()
        return {
            "active_bytes.all.peak": peak,
            "reserved_bytes.all.peak": peak,
            "num_alloc_retries": 0,
            "num_ooms": 0,
        }

    @staticmethod
    def reset_peak_memory_stats() -> None:
        """Restart the peak at the present resident set, where the kernel allows it (Linux)."""
        try:
            with open(_PROC_CLEAR_REFS, "w") as file:
                file.write("5")
        except OSError:
            pass  # the peak is then the one since the process started

    @staticmethod
    def empty_cache() -> None:
        """Nothing to return: the CPU allocator keeps no cache."""


def peak_resident_bytes() -> int:
    """Peak resident set of this process in bytes, since the last reset."""
    try:
        with open(_PROC_STATUS) as file:
            for line in file:
                if line.startswith("VmHWM:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


@functools.cache
def measured_peak_flops(size: int = 768, repeats: int = 8) -> float:
    """Float32 matmul rate of this process in FLOP/s: the best of a few products, about 0.1 s.

    A CPU has no data-sheet number that fits its thread count, so the MFU of a CPU run compares with
    what a large matmul reaches here with the same threads. Processor time: other processes of the
    host must not lower the peak.
    """
    a, b = torch.ones(size, size), torch.ones(size, size)
    best = float("inf")
    for _ in range(repeats):
        start = time.thread_time()
        torch.mm(a, b)
        best = min(best, time.thread_time() - start)
    return 2 * size**3 / best
