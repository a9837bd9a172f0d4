"""Real ranks: processes of torchrun, or spawned here, over gloo or NCCL."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from striped_cp import Layout, ring_attention, ulysses
from striped_cp.kernels.base import BackwardInputs, Inputs
from striped_cp.process_group import ProcessGroupRing

from .case import Case
from .measure import Samples, Timing, Yardsticks, one_thread, peak_memory, wall_clock


def under_torchrun() -> bool:
    return "TORCHELASTIC_RUN_ID" in os.environ


def measure(case: Case, layouts: dict[str, Layout], repeats: int) -> Samples | None:
    """Samples on rank 0 or in the process that spawned the ranks; None on the other ranks."""
    if under_torchrun():
        samples = _measure_rank(case, layouts, repeats)
        return samples if dist.get_rank() == 0 else None
    results = mp.get_context("spawn").SimpleQueue()
    port = _free_port()
    mp.spawn(_spawned_rank, (case, layouts, repeats, port, results), nprocs=case.world_size)
    return results.get()


def _spawned_rank(
    rank: int,
    case: Case,
    layouts: dict[str, Layout],
    repeats: int,
    port: int,
    results: mp.SimpleQueue,
) -> None:
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(case.world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    samples = _measure_rank(case, layouts, repeats)
    if rank == 0:
        results.put(samples)
    dist.destroy_process_group()


def _measure_rank(case: Case, layouts: dict[str, Layout], repeats: int) -> Samples:
    """The slowest rank's seconds and the largest rank's bytes.

    Layouts take turns in every repeat, so that a drifting machine favours none.
    """
    one_thread(case.device)
    if case.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    # Makes the process group, or uses the one that exists.
    sizes = (case.world_size // case.ulysses, case.ulysses)
    mesh = init_device_mesh(case.device, sizes, mesh_dim_names=("cp", "ulysses"))
    now = wall_clock(case.device)
    yardsticks = Yardsticks(case, now)
    tensors = case.tensors(case.seq_len // case.world_size, dist.get_rank())

    def run(layout: Layout) -> Timing:
        query, key, value = (x.detach().requires_grad_() for x in tensors[:3])
        started = now()
        out = ring_attention(
            query,
            key,
            value,
            mesh=mesh,
            layout=layout,
            documents=case.packed(),
            rotate_method=case.rotate_method,  # type: ignore[arg-type]
            kernel=case.kernel,
            window=case.window,
        )
        forward = now()
        torch.autograd.grad(out, (query, key, value), tensors[3])
        return Timing(forward - started, now() - forward)

    def slowest(measured: Callable[[], Timing]) -> Timing:
        dist.barrier()
        timing = measured()
        # Of forward and total: the rank that is slow in one need not be slow in the other.
        seconds = torch.tensor([timing.forward, timing.total], device=case.device)
        dist.all_reduce(seconds, dist.ReduceOp.MAX)
        forward, total = seconds.tolist()
        return Timing(forward, total - forward)

    samples = Samples(
        {name: _peak(case, layout, mesh, tensors) for name, layout in layouts.items()}
    )
    for _ in range(repeats):
        samples.add_yardsticks(yardsticks, slowest)
        first = dist.get_rank() == 0
        samples.alone.append(slowest(yardsticks.ideal if first else lambda: Timing(0.0, 0.0)))
        for name, layout in layouts.items():
            samples.rings[name].append(slowest(partial(run, layout)))
    return samples


def _peak(case: Case, layout: Layout, mesh: DeviceMesh, tensors: Sequence[Tensor]) -> int:
    """Bytes of the largest rank, with a ring of its own so that its receive buffers count."""
    ring, axis = (ProcessGroupRing(mesh.get_group(dim)) for dim in range(2))
    query, key, value, grad_out = tensors
    tiles = case.tiles(layout, ring.world_size, ring.rank)
    how = axis, tiles, case.chosen_kernel(), ring, case.scale, case.rotate_method

    def run() -> None:
        out, lse = ulysses.forward(Inputs(query, key, value), *how)
        ulysses.backward(BackwardInputs(query, key, value, out, lse, grad_out), *how)

    nbytes = torch.tensor(peak_memory(case.device, run), device=case.device)
    dist.all_reduce(nbytes, dist.ReduceOp.MAX)
    return int(nbytes)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
