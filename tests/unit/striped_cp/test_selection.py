"""Selection of a kernel: wrong ones are out, the fastest of the others is taken by all ranks."""

import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from striped_cp import select_kernel, selection
from striped_cp.kernels import KERNELS
from striped_cp.kernels.base import Inputs, Partial, Request
from striped_cp.kernels.cpu import CpuKernel
from striped_cp.merge import merge_
from striped_cp.tiles import Tile
from tests.helpers.launch import run_ranks

REQUEST = Request("cpu", torch.float32, 16, True)


class Slow(CpuKernel):
    """Right, but on ranks that it is told of it takes its time."""

    name = "slow"

    def __init__(self, ranks: tuple[int, ...] = (0, 1)) -> None:
        self.ranks = ranks

    def forward(self, x: Inputs, tile: Tile, scale: float) -> Iterator[Partial]:
        if not dist.is_initialized() or dist.get_rank() in self.ranks:
            time.sleep(0.05)
        yield from super().forward(x, tile, scale)


class Wrong(CpuKernel):
    """Off by a thousandth, forward, where it is told."""

    name = "wrong"

    def __init__(self, ranks: tuple[int, ...] = (0, 1)) -> None:
        self.ranks = ranks

    def forward(self, x: Inputs, tile: Tile, scale: float) -> Iterator[Partial]:
        here = not dist.is_initialized() or dist.get_rank() in self.ranks
        for partial in super().forward(x, tile, scale):
            yield partial._replace(out=partial.out * 1.001) if here else partial


class Raising(CpuKernel):
    name = "raising"

    def attend_backward(self, *args: Any) -> Any:
        raise RuntimeError("no kernel image is available for execution on the device")


class Refusing(CpuKernel):
    name = "refusing"

    def refuse(self, request: Request) -> str | None:
        return "it is not installed"


def offer(monkeypatch: pytest.MonkeyPatch, *kernels: CpuKernel) -> None:
    for kernel in kernels:
        monkeypatch.setitem(KERNELS, kernel.name, kernel)


def select(name: str = "auto", **changes: Any) -> selection.Selection:
    return select_kernel(name, REQUEST, **{"heads": 4, "kv_heads": 2, "rows": 64, **changes})


def test_wrong_slow_raising_and_refusing_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    offer(monkeypatch, Slow(), Wrong(), Raising(), Refusing())
    found = select()
    assert found.kernel == "cpu"
    assert set(found.seconds) == {"cpu", "slow"}
    assert found.relative["cpu"] == 1.0
    assert found.relative["slow"] > 1.0
    assert found.refused["refusing"] == "it is not installed"
    assert found.refused["raising"] == "raises an error"
    assert found.refused["wrong"].startswith("wrong by ")
    line = str(found)
    assert line.startswith("cpu 1.00 (chosen), slow ")
    assert "; wrong refused: wrong by " in line
    assert "\n" not in line


def test_a_named_kernel_is_checked_and_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    offer(monkeypatch, Slow(), Wrong())
    assert str(select("slow")) == "slow (checked)"
    with pytest.raises(
        ValueError, match=r"kernel = 'wrong': wrong on this device: wrong: wrong by"
    ):
        select("wrong")
    with pytest.raises(ValueError, match=r"kernel = 'flash' cannot serve: it runs on CUDA"):
        select("flash")


class Windowless(CpuKernel):
    """Takes no notice of windows."""

    name = "windowless"

    def forward(self, x: Inputs, tile: Tile, scale: float) -> Iterator[Partial]:
        passes = tuple(replace(p, window=None) for p in tile.passes)
        yield from super().forward(x, replace(tile, passes=passes), scale)


def test_windows_are_checked_where_the_model_has_some(monkeypatch: pytest.MonkeyPatch) -> None:
    offer(monkeypatch, Windowless())
    assert select("windowless").kernel == "windowless"
    assert select("cpu", windowed=True).kernel == "cpu"
    with pytest.raises(ValueError, match="wrong on this device: windowless: wrong by"):
        select("windowless", windowed=True)


def test_fewer_rows_are_timed_where_time_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    offer(monkeypatch, Slow())
    timed = []
    runs = selection._runs

    def record(names: list[str], request: Request, heads: int, kv: int, rows: int) -> list[float]:
        timed.append(rows)
        return runs(names, request, heads, kv, rows)

    monkeypatch.setattr(selection, "_runs", record)
    select(rows=4096, seconds=0.0)
    assert set(timed) == {512}


def on_two_ranks() -> tuple[str, dict[str, str]]:
    """One rank alone sees a kernel fail, the other alone is slow with one."""
    KERNELS["wrong"], KERNELS["slow"] = Wrong((0,)), Slow((1,))
    found = select(group=dist.group.WORLD)
    return found.kernel, found.refused


def test_ranks_choose_alike() -> None:
    first, second = run_ranks(2, on_two_ranks)
    assert first == second
    kernel, refused = first
    assert kernel == "cpu"
    assert set(refused) == {"wrong"}


def test_a_gpu_where_torch_compile_does_not_work(monkeypatch):
    def broken(*args):
        raise RuntimeError("Failed to find C compiler\nmore")

    monkeypatch.setattr(selection, "compiled_merge", lambda: merge_)
    selection._check_merge(REQUEST, None)
    monkeypatch.setattr(selection, "compiled_merge", lambda: broken)
    with pytest.raises(ValueError, match=r"it needs the Triton .*: Failed to find C compiler$"):
        selection._check_merge(REQUEST, None)
