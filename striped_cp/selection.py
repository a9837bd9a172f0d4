"""Which kernel a run takes: each one is checked, and timed, on the device that it will run on."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor

from .algorithm import attention_backward, attention_forward
from .documents import Documents
from .kernels import KERNELS, choose_kernel
from .kernels.base import BackwardInputs, Inputs, Request, TileAttention
from .layout import TOKEN_STRIPES, Layout
from .loopback import loopback
from .merge import OutputAccumulator, compiled_merge
from .ring import Ring
from .tiles import Tile, tiles_of_rank

# Of the largest value: a few units in the last place of the dtype.
TOLERANCE = {
    torch.float64: 1e-10,
    torch.float32: 1e-5,
    torch.bfloat16: 2e-2,
    torch.float16: 3e-3,
}
_RING, _ROWS = 3, 40  # of the check: every kind of tile, and rows that fill no block of a kernel
_WINDOW = 50
_ROUNDS = 3
_LEAST_ROWS = 512


@dataclass
class Selection:
    """A kernel, and what was found out about all.

    Attributes:
        kernel: name of the one to take.
        seconds: of a tile, forward and backward, median, the slowest rank's; empty where there was
            no choice.
        refused: why others cannot serve, or what is wrong with them, by name.
        usual: the one that `kernel="auto"` takes without measuring, which times are compared with.
    """

    kernel: str
    seconds: dict[str, float] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    usual: str = ""

    @property
    def relative(self) -> dict[str, float]:
        """Time over that of the usual one, or of the chosen one where that cannot serve."""
        unit = self.seconds.get(self.usual) or self.seconds.get(self.kernel, 1.0)
        return {name: seconds / unit for name, seconds in self.seconds.items()}

    def __str__(self) -> str:
        parts = [
            f"{name} {ratio:.2f}" + (" (chosen)" if name == self.kernel else "")
            for name, ratio in sorted(self.relative.items(), key=lambda item: item[1])
        ]
        told = ", ".join(parts) or f"{self.kernel} (checked)"
        return "; ".join([told, *(f"{name} refused: {why}" for name, why in self.refused.items())])


def select_kernel(
    name: str,
    request: Request,
    *,
    heads: int,
    kv_heads: int,
    rows: int,
    windowed: bool = False,
    group: dist.ProcessGroup | None = None,
    seconds: float = 15.0,
) -> Selection:
    """The fastest kernel that computes the right numbers on this device, the same on all ranks.

    Each one that serves the request is checked on small tiles, forward and backward, grouped-query,
    with documents if the request has them, against plain attention in float32. Those that pass are
    timed on a tile of the run, without a window. A kernel that is named is checked only.

    Args:
        name: "auto", or a kernel.
        request: what the run asks for; its device type is that of the calling rank's device.
        heads, kv_heads: of this rank.
        rows: S/P; fewer are timed where these would take too long.
        windowed: check sliding windows, too.
        group: ranks that must agree, a collective of all of them; None: this one alone.
        seconds: that timing may take.

    Raises:
        ValueError: the named kernel cannot serve or computes wrong numbers, or none can, or
            torch.compile does not work here; on all ranks alike.
    """
    usual = choose_kernel(name, request).name  # refuses here what cannot serve
    if request.device_type != "cpu":
        _check_merge(request, group)
    candidates = [name]
    if name == "auto":
        candidates = [n for n, k in KERNELS.items() if k.device_type == request.device_type]
    refused = {n: KERNELS[n].refuse(request) for n in candidates}
    able = [n for n in candidates if refused[n] is None]
    wrong = dict(
        zip(able, _agree([_wrong(n, request, windowed) for n in able], request, group), strict=True)
    )
    reasons = {n: why for n, why in refused.items() if why is not None}
    reasons |= {n: _told(error) for n, error in wrong.items() if error > TOLERANCE[request.dtype]}
    right = [n for n in able if n not in reasons]
    if not right:
        found = "; ".join(f"{n}: {reasons[n]}" for n in able)
        raise ValueError(f"kernel = {name!r}: wrong on this device: {found}")
    if len(right) == 1:
        return Selection(right[0], {}, reasons, usual)
    times = _agree(_timed(right, request, heads, kv_heads, rows, group, seconds), request, group)
    by_name = dict(zip(right, times, strict=True))
    return Selection(min(by_name, key=lambda n: by_name[n]), by_name, reasons, usual)


def _check_merge(request: Request, group: dist.ProcessGroup | None) -> None:
    """Compile the merge of partial results, which needs Triton and a C compiler."""
    problem = ""
    try:
        out, lse = torch.zeros(1, 1, 2, 8, device=request.device_type).split((7, 1), dim=-1)
        compiled_merge()(out, lse[..., 0], out.clone(), lse[..., 0].clone())
    except Exception as error:  # whatever a compiler says
        problem = f": {str(error).strip().splitlines()[0]}"
    (failed,) = _agree([float(bool(problem))], request, group)
    if failed:
        raise ValueError(
            "torch.compile cannot build the merge of partial results here; it needs the Triton "
            f"that this torch was built with, and a C compiler{problem}"
        )


def _agree(numbers: list[float], request: Request, group: dist.ProcessGroup | None) -> list[float]:
    """The largest of all ranks."""
    if group is None or not numbers:
        return numbers
    found = torch.tensor(numbers, dtype=torch.float64, device=request.device_type)
    dist.all_reduce(found, dist.ReduceOp.MAX, group=group)
    return found.tolist()


def _told(error: float) -> str:
    return "raises an error" if error == float("inf") else f"wrong by {error:.1e} of the largest"


def _wrong(name: str, request: Request, windowed: bool) -> float:
    """The largest error of out, dq, dk, dv over all cases; inf where the kernel raises one."""
    try:
        worst = 0.0
        for packed, window in product(
            (False, True) if request.packed else (False,), (None, _WINDOW) if windowed else (None,)
        ):
            kernel, sizes = KERNELS[name], {"heads": 4, "kv_heads": 2, "rows": _ROWS}
            errors = kernel_errors(kernel, request, TOKEN_STRIPES, packed, **sizes, window=window)
            # Not max() of them: a NaN must be seen.
            worst = max([worst, *(e if e == e else float("inf") for e in errors.values())])
        return worst
    except Exception:  # whatever a kernel does that was not made for this device
        return float("inf")


def kernel_errors(
    kernel: TileAttention,
    request: Request,
    layout: Layout,
    packed: bool,
    *,
    heads: int,
    kv_heads: int,
    rows: int,
    world_size: int = _RING,
    window: int | None = None,
) -> dict[str, float]:
    """Largest error of out, dq, dk and dv of a whole ring, relative to the largest value of each.

    Against the plain attention of kernel "reference" in float32 (float64 for float64).

    Args:
        packed: two batch rows, cut differently; one has documents shorter than the ring.
        rows: S/P.
    """
    device = request.device_type
    end = world_size * rows
    cuts = [[0, 1, 3, 6, end // 3, end - 1, end], [0, end // 2 + 1, end]]
    documents = Documents.from_cu_seqlens(cuts) if packed else None
    generator = torch.Generator(device).manual_seed(0)

    def random(count: int) -> Tensor:
        shape = (world_size, 2, rows, count, request.head_dim)
        x = torch.randn(shape, generator=generator, device=device)
        return x.to(request.dtype).transpose(2, 3)

    # By rank: query, key, value and the gradient of the output.
    inputs = [random(count) for count in (heads, kv_heads, kv_heads, heads)]
    exact = [x.to(torch.promote_types(x.dtype, torch.float32)) for x in inputs]
    run = partial(_whole_ring, layout, documents, window)
    got, want = run(kernel, inputs), run(KERNELS["reference"], exact)
    return {
        name: float((x.to(y.dtype) - y).abs().max() / y.abs().max())
        for name, x, y in zip(("out", "dq", "dk", "dv"), got, want, strict=True)
    }


def _whole_ring(
    layout: Layout,
    documents: Documents | None,
    window: int | None,
    kernel: TileAttention,
    inputs: list[Tensor],
) -> list[Tensor]:
    """out, dq, dk, dv of all ranks, (P, B, H, n, D)."""
    world_size, _, _, rows, head_dim = inputs[0].shape

    def rank_main(ring: Ring) -> tuple[Tensor, ...]:
        query, key, value, grad_out = (x[ring.rank] for x in inputs)
        seq_len = world_size * rows
        tiles = tiles_of_rank(layout, seq_len, world_size, ring.rank, documents, window)
        how = tiles, kernel, ring, head_dim**-0.5, "ring"
        out, lse = attention_forward(Inputs(query, key, value), *how)
        return out, *attention_backward(BackwardInputs(query, key, value, out, lse, grad_out), *how)

    return [torch.stack(parts) for parts in zip(*loopback(world_size, rank_main), strict=True)]


def _timed(
    names: list[str],
    request: Request,
    heads: int,
    kv_heads: int,
    rows: int,
    group: dist.ProcessGroup | None,
    seconds: float,
) -> list[float]:
    """Median seconds of a tile on this rank, forward and backward, kernels taking turns."""
    started = time.monotonic()
    size = min(rows, _LEAST_ROWS)
    once = sum(_runs(names, request, heads, kv_heads, size)) / len(names)  # compiles, too
    while size < rows:
        once = max(_runs(names, request, heads, kv_heads, size))
        left = seconds - (time.monotonic() - started)
        # Twice the rows are four times the work, for a first run and the rounds.
        if 4 * once * len(names) * (_ROUNDS + 1) > left:
            break
        size = min(2 * size, rows)
    (size,) = (-int(x) for x in _agree([-float(size)], request, group))
    rounds = [_runs(names, request, heads, kv_heads, size) for _ in range(_ROUNDS + 1)][1:]
    return [median(times) for times in zip(*rounds, strict=True)]


def _runs(names: list[str], request: Request, heads: int, kv_heads: int, rows: int) -> list[float]:
    """Seconds of one tile of `rows` rows, by kernel."""
    documents = None
    if request.packed:
        documents = Documents.from_cu_seqlens([[0, rows // 2, rows, 2 * rows]])
    tile = tiles_of_rank(TOKEN_STRIPES, 2 * rows, 2, 0, documents)[0]
    device = request.device_type

    def random(count: int) -> Tensor:
        x = torch.randn(1, rows, count, request.head_dim, dtype=request.dtype, device=device)
        return x.transpose(1, 2)

    query, key, value, grad_out = map(random, (heads, kv_heads, kv_heads, heads))
    x = Inputs(query, key, value)
    return [_seconds(partial(_tile, KERNELS[n], x, grad_out, tile), device) for n in names]


def _tile(kernel: TileAttention, x: Inputs, grad_out: Tensor, tile: Tile) -> None:
    scale = x.query.shape[-1] ** -0.5
    total = OutputAccumulator(x.query)
    for partial_out in kernel.forward(x, tile, scale):
        total.add(partial_out)
    for _ in kernel.backward(BackwardInputs(*x, total.out, total.lse, grad_out), tile, scale):
        pass


def _seconds(run: Callable[[], None], device: str) -> float:
    def wait() -> None:
        if device != "cpu":
            torch.accelerator.synchronize()

    wait()
    started = time.perf_counter()
    run()
    wait()
    return time.perf_counter() - started
