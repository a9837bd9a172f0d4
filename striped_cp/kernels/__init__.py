"""Attention kernels and the choice among them."""

from __future__ import annotations

from .base import Kernel, Request
from .cpu import CpuKernel
from .cudnn import CudnnKernel
from .flash import Flash3Kernel, Flash4Kernel, FlashKernel
from .flex import FlexKernel
from .reference import ReferenceKernel

KERNELS: dict[str, Kernel] = {
    kernel.name: kernel
    for kernel in (
        FlashKernel(),
        Flash3Kernel(),
        Flash4Kernel(),
        CudnnKernel(),
        FlexKernel(),
        CpuKernel(),
        ReferenceKernel(),
    )
}


def choose_kernel(name: str, request: Request) -> Kernel:
    """The kernel called `name`, or with "auto" the fastest that serves the request.

    Raises:
        ValueError: that kernel cannot serve; says why, and which kernels can.
    """
    if name == "auto":
        name = _automatic(request)
    reason = KERNELS[name].refuse(request)
    if reason is not None:
        able = ", ".join(repr(k) for k in KERNELS if KERNELS[k].refuse(request) is None)
        raise ValueError(f"kernel = {name!r} cannot serve: {reason}; kernels that can: {able}")
    return KERNELS[name]


def _automatic(request: Request) -> str:
    """By device, dtype and head size, without measuring (`select_kernel` does).

    FlashAttention-2 covers every layout and packing on CUDA in 16 bits; what it refuses (float32,
    odd head sizes) FlexAttention computes.
    """
    if request.device_type == "cpu":
        return "cpu"
    return "flash" if KERNELS["flash"].refuse(request) is None else "flex"
