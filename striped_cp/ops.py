"""The ring as torch custom operators.

`striped_cp::ring_attention` and its backward are opaque to torch.compile (fullgraph included), and
a selective activation-checkpointing policy can name the forward to keep its output:
`torch.ops.striped_cp.ring_attention.default`.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group, _set_pg_timeout

from .documents import Documents
from .kernels import Kernel, Request, choose_kernel
from .layout import layout_from_spec
from .observe import observed
from .ring import (
    ProcessGroupRing,
    Ring,
    SingleRing,
    attention_backward,
    attention_forward,
    time_limit,
)
from .tiles import Tile, tiles_of_rank

_rings: WeakKeyDictionary[dist.ProcessGroup, ProcessGroupRing] = WeakKeyDictionary()


def _ring(group_name: str, device: torch.device) -> Ring:
    """The ring of a process group's ranks, made once so that its receive buffers are reused.

    It talks over a group of its own: others may run collectives on the mesh's, as FSDP does where
    the ring takes all ranks, and a hop must not queue behind them. Its time limit follows that of
    the mesh's group, which trainers change after the first step.
    """
    if not group_name:
        return SingleRing()
    group = _resolve_process_group(dist.GroupName(group_name))
    ring = _rings.get(group)
    if ring is None:
        own = dist.new_group(
            dist.get_process_group_ranks(group),
            backend=dist.get_backend_config(group),
            use_local_synchronization=True,  # only the ring's ranks are here
            group_desc="striped_cp_ring",
        )
        ring = _rings[group] = ProcessGroupRing(own)
    limit = time_limit(group, device)
    if time_limit(ring.group, device) != limit:
        _set_pg_timeout(limit, ring.group)
    return ring


def _plan(
    query: Tensor, boundaries: Tensor | None, layout_spec: str, kernel_name: str, ring: Ring
) -> tuple[tuple[Tile, ...], Kernel]:
    layout = layout_from_spec(layout_spec)
    documents = None if boundaries is None else Documents(boundaries)
    seq_len = query.shape[2] * ring.world_size
    tiles = tiles_of_rank(layout, seq_len, ring.world_size, ring.rank, documents)
    request = Request(query.device.type, query.dtype, query.shape[3], layout, documents)
    return tiles, choose_kernel(kernel_name, request)


@torch.library.custom_op("striped_cp::ring_attention", mutates_args=())
def ring_attention_op(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    boundaries: Tensor | None,
    layout: str,
    group_name: str,
    scale: float,
    rotate_method: str,
    kernel: str,
) -> tuple[Tensor, Tensor]:
    """(out, lse) of this rank's queries over all ranks' keys.

    Args:
        query: (B, H, S/P, D); key, value: (B, Hkv, S/P, D).
        boundaries: `Documents.boundaries`, or None for one document.
        layout: `Layout.spec`.
        group_name: process group of the ring; "" for a ring of one rank.

    Returns:
        out (B, H, S/P, D) and lse (B, H, S/P); lse carries no gradient.
    """
    ring = _ring(group_name, query.device)
    tiles, chosen = _plan(query, boundaries, layout, kernel, ring)
    ring, chosen = observed(ring, chosen)
    return attention_forward(query, key, value, tiles, chosen, ring, scale, rotate_method)


@ring_attention_op.register_fake
def _(query, key, value, boundaries, layout, group_name, scale, rotate_method, kernel):
    batch, heads, rows, _ = query.shape
    out = query.new_empty(batch, rows, heads, value.shape[3]).transpose(1, 2)
    lse_dtype = torch.promote_types(query.dtype, torch.float32)
    return out, query.new_empty(batch, heads, rows, dtype=lse_dtype)


@torch.library.custom_op("striped_cp::ring_attention_backward", mutates_args=())
def ring_attention_backward_op(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    boundaries: Tensor | None,
    layout: str,
    group_name: str,
    scale: float,
    rotate_method: str,
    kernel: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv); arguments as in `ring_attention`, plus its results and the gradient of out."""
    ring = _ring(group_name, query.device)
    tiles, chosen = _plan(query, boundaries, layout, kernel, ring)
    ring, chosen = observed(ring, chosen)
    return attention_backward(
        grad_out, query, key, value, out, lse, tiles, chosen, ring, scale, rotate_method
    )


@ring_attention_backward_op.register_fake
def _(
    grad_out,
    query,
    key,
    value,
    out,
    lse,
    boundaries,
    layout,
    group_name,
    scale,
    rotate_method,
    kernel,
):
    return tuple(x.new_empty(x.transpose(1, 2).shape).transpose(1, 2) for x in (query, key, value))


def _setup_context(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    query, key, value, boundaries, *ctx.options = inputs
    ctx.save_for_backward(query, key, value, *output, boundaries)


def _backward(ctx: Any, grad_out: Tensor, grad_lse: Tensor | None) -> tuple:
    query, key, value, out, lse, boundaries = ctx.saved_tensors
    grads = ring_attention_backward_op(
        grad_out, query, key, value, out, lse, boundaries, *ctx.options
    )
    return *grads, *[None] * 6


ring_attention_op.register_autograd(_backward, setup_context=_setup_context)
