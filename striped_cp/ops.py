"""The ring as torch custom operators.

`striped_cp::ring_attention` and its backward are opaque to torch.compile (fullgraph included), and
a selective activation-checkpointing policy can name the forward to keep its output:
`torch.ops.striped_cp.ring_attention.default`. CUDA graphs (`mode="reduce-overhead"`) leave them
out: a graph would replay addresses of buffers that other layers share, and hops on another stream.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from . import ulysses
from .axes import Axis
from .documents import Documents
from .kernels import Request, choose_kernel
from .kernels.base import BackwardInputs, Inputs, TileAttention
from .layout import layout_from_spec
from .observer import observed
from .process_group import ProcessGroupRing
from .ring import Buffers, Ring, SingleRing
from .tiles import Tile, tiles_of_rank

# Receive buffers of every ring, for as long as its process group lives.
_buffers: WeakKeyDictionary[dist.ProcessGroup, Buffers] = WeakKeyDictionary()


def _ring(group_name: str) -> Ring:
    if not group_name:
        return SingleRing()
    group = Axis(group_name).group()
    return ProcessGroupRing(group, _buffers.setdefault(group, {}))


def _prepare(
    query: Tensor,
    boundaries: Tensor | None,
    layout_spec: str,
    ring_name: str,
    ulysses_name: str,
    kernel_name: str,
    window: int | None,
) -> tuple[Ring, tuple[Tile, ...], TileAttention, Ring]:
    """What one direction of attention needs, in the order of its arguments."""
    ring, axis = _ring(ring_name), _ring(ulysses_name)
    layout = layout_from_spec(layout_spec)
    documents = None if boundaries is None else Documents.checked_before(boundaries)
    seq_len = query.shape[2] * axis.world_size * ring.world_size
    tiles = tiles_of_rank(layout, seq_len, ring.world_size, ring.rank, documents, window)
    request = Request(query.device.type, query.dtype, query.shape[3], documents is not None)
    (axis, ring), kernel = observed((axis, ring), choose_kernel(kernel_name, request))
    return axis, tiles, kernel, ring


@torch.library.custom_op(
    "striped_cp::ring_attention", mutates_args=(), tags=torch.Tag.cudagraph_unsafe
)
def ring_attention_op(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    boundaries: Tensor | None,
    layout: str,
    ring: str,
    ulysses_axis: str,
    scale: float,
    rotate_method: str,
    kernel: str,
    window: int | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(out, lse) of this rank's queries over all ranks' keys.

    Args:
        query: (B, H, S/P, D); key, value: (B, Hkv, S/P, D).
        boundaries: `Documents.boundaries`, or None for one document.
        layout: `Layout.spec`.
        ring, ulysses_axis: process groups of the axes; "" for a rank alone.

    Returns:
        out (B, H, S/P, D) and lse (B, H/U, U S/P); lse carries no gradient.
    """
    prepared = _prepare(query, boundaries, layout, ring, ulysses_axis, kernel, window)
    with torch.autocast(query.device.type, enabled=False):
        return ulysses.forward(Inputs(query, key, value), *prepared, scale, rotate_method, sinks)


@ring_attention_op.register_fake
def _(query, key, value, boundaries, layout, ring, ulysses_axis, *options):
    batch, heads, rows, _ = query.shape
    out = query.new_empty(batch, rows, heads, value.shape[3]).transpose(1, 2)
    lse_dtype = torch.promote_types(query.dtype, torch.float32)
    size = _ring(ulysses_axis).world_size
    return out, query.new_empty(batch, heads // size, rows * size, dtype=lse_dtype)


@torch.library.custom_op(
    "striped_cp::ring_attention_backward", mutates_args=(), tags=torch.Tag.cudagraph_unsafe
)
def ring_attention_backward_op(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    boundaries: Tensor | None,
    layout: str,
    ring: str,
    ulysses_axis: str,
    scale: float,
    rotate_method: str,
    kernel: str,
    window: int | None,
    sinks: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(dq, dk, dv, dsinks); arguments as in `ring_attention`, its results, the gradient of out.

    dsinks is this rank's share, without elements where there are no sinks.
    """
    prepared = _prepare(query, boundaries, layout, ring, ulysses_axis, kernel, window)
    with torch.autocast(query.device.type, enabled=False):
        x = BackwardInputs(query, key, value, out, lse, grad_out)
        dq, dk, dv, dsinks = ulysses.backward(x, *prepared, scale, rotate_method, sinks)
        return dq, dk, dv, query.new_empty(0) if dsinks is None else dsinks


@ring_attention_backward_op.register_fake
def _(grad_out, query, key, value, *rest):
    sinks = rest[-1]
    dsinks = query.new_empty(0) if sinks is None else torch.empty_like(sinks)
    grads = (x.new_empty(x.transpose(1, 2).shape).transpose(1, 2) for x in (query, key, value))
    return *grads, dsinks


def _setup_context(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    query, key, value, boundaries, *ctx.options, sinks = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(query, key, value, *output, boundaries, sinks)


def _backward(ctx: Any, grad_out: Tensor, _grad_lse: Tensor | None) -> tuple:
    query, key, value, out, lse, boundaries, sinks = ctx.saved_tensors
    *grads, dsinks = ring_attention_backward_op(
        grad_out, query, key, value, out, lse, boundaries, *ctx.options, sinks
    )
    return *grads, *[None] * 8, None if sinks is None else dsinks


ring_attention_op.register_autograd(_backward, setup_context=_setup_context)
