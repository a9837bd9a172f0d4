"""Activation checkpoints that wait in host memory between forward and backward.

Full checkpointing still keeps one input per transformer block: 32 GiB for the 131,072 tokens that
each of 8 ranks holds of 1M in Llama-3-8B, and as much again for the attention outputs that spare
the backward pass a second run of the ring. A copy to the host takes a small part of the time that
a block computes: 1 GiB takes 20 ms over PCIe 5.0, and a block of that model at that length
computes for more than a second.

Copies run on a stream of their own. A block's backward starts the way back of the block before it,
so that its tensors have arrived when its turn comes. On a CPU host there is one memory, and the
copy is just a copy.
"""

import contextlib
import os
import weakref
from collections.abc import Iterator

import torch
from torch import Tensor


class CheckpointOffload:
    """Where the checkpoints of one model part (one pipeline stage) go.

    The model calls `start` before its first block and runs every block inside `block`.
    """

    def __init__(self) -> None:
        self._stream: torch.Stream | None = None
        self._blocks: _Block | None = None
        self._leaving: list[tuple[Tensor, torch.Event]] = []

    def start(self) -> None:
        """A forward pass begins: its first block has none before it."""
        self._blocks = None

    @contextlib.contextmanager
    def block(self, block_input: Tensor) -> Iterator[None]:
        """Run one block: what autograd or a checkpoint saves of `block_input` goes to the host."""
        self._blocks = _Block(self._blocks)

        # Autograd holds on to `pack`, which therefore must not hold the tensor.
        wanted = _identity(block_input)

        def pack(tensor: Tensor) -> "Tensor | HostTensor":
            return self.store(tensor) if _identity(tensor) == wanted else tensor

        def unpack(saved: "Tensor | HostTensor") -> Tensor:
            return saved if isinstance(saved, Tensor) else self.fetch(saved)

        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            yield

    def store(self, tensor: Tensor) -> "HostTensor":
        """Start the copy of a tensor of the present block to the host."""
        assert self._blocks is not None
        stored = HostTensor(self._blocks, tensor.device, _empty_on_host(tensor))
        self._blocks.tensors.append(weakref.ref(stored))
        if not has_own_memory(tensor.device):
            stored.host.copy_(tensor)
            return stored
        self._let_go()
        stream = self._side_stream()
        stream.wait_stream(torch.accelerator.current_stream())
        with stream:
            stored.host.copy_(tensor, non_blocking=True)
        self._leaving.append((tensor, stream.record_event()))
        return stored

    def fetch(self, stored: "HostTensor") -> Tensor:
        """The tensor on its device; sends for its whole block and for the block before it."""
        if not has_own_memory(stored.device):
            return stored.host
        self._let_go()
        stored.block.send_for(self._side_stream())
        if stored.block.before is not None:
            stored.block.before.send_for(self._side_stream())
        assert stored.arriving is not None
        tensor, event = stored.arriving
        stored.arriving = None
        torch.accelerator.current_stream().wait_event(event)
        return tensor

    def _let_go(self) -> None:
        """Drop the tensors on their way out: what is enqueued from here on may use their memory."""
        for _, event in self._leaving:
            torch.accelerator.current_stream().wait_event(event)
        self._leaving.clear()

    def _side_stream(self) -> torch.Stream:
        if self._stream is None:
            self._stream = torch.Stream()
        return self._stream


class _Block:
    """The host tensors of one block in one forward pass, and the block that ran before it.

    Autograd's graph owns the tensors: their memory must go with it, not wait for the garbage
    collector, which torchtitan runs every so many steps only.
    """

    def __init__(self, before: "_Block | None"):
        self.before = before
        self.tensors: list[weakref.ref[HostTensor]] = []
        self.sent_for = False

    def send_for(self, stream: torch.Stream) -> None:
        """Start the copies of all tensors back to their device, once."""
        if self.sent_for:
            return
        self.sent_for = True
        compute = torch.accelerator.current_stream()
        alive = [stored for ref in self.tensors if (stored := ref()) is not None]
        arriving = [torch.empty_like(s.host, device=s.device) for s in alive]
        # The memory comes from the compute stream, which may still be using it.
        stream.wait_stream(compute)
        for stored, tensor in zip(alive, arriving, strict=True):
            with stream:
                tensor.copy_(stored.host, non_blocking=True)
            stored.arriving = (tensor, stream.record_event())


class HostTensor:
    """A tensor on the host, and its copy on the way back to the device once that has begun."""

    def __init__(self, block: _Block, device: torch.device, host: Tensor):
        self.block = block
        self.device = device
        self.host = host
        self.arriving: tuple[Tensor, torch.Event] | None = None


def has_own_memory(device: torch.device) -> bool:
    """Whether a device's memory is another than the host's."""
    return device.type != "cpu"


def _identity(tensor: Tensor) -> tuple:
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


def _empty_on_host(tensor: Tensor) -> Tensor:
    """Host memory for a tensor, with its strides; pinned, so that copies run beside kernels."""
    try:
        return torch.empty_like(tensor, device="cpu", pin_memory=has_own_memory(tensor.device))
    except RuntimeError as error:
        raise RuntimeError(
            f"memory.offload_checkpoints: the host has no room for {tensor.nbytes / 2**30:.2f} GiB "
            f"more ({host_memory_available() / 2**30:.1f} GiB available): use more ranks per "
            f"sequence, or set memory.offload_checkpoints = false ({error})"
        ) from None


def host_memory_available() -> int:
    """Bytes that this host, or the container this process runs in, can still give."""
    available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    with contextlib.suppress(OSError), open("/proc/meminfo") as file:
        for line in file:
            if line.startswith("MemAvailable:"):
                available = int(line.split()[1]) * 1024
    with contextlib.suppress(OSError, ValueError):  # the limit is "max" where there is none
        limit, used = (_read_number(f"/sys/fs/cgroup/memory.{name}") for name in ("max", "current"))
        available = min(available, limit - used)
    return available


def _read_number(path: str) -> int:
    with open(path) as file:
        return int(file.read())
