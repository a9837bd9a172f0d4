"""`ring_attention`: the public function, its checks, and DTensors in and out."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor
from torch.autograd.forward_ad import unpack_dual
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from .axes import Axes, axes_of, check_order
from .documents import Documents
from .kernels import KERNELS
from .layout import TOKEN_STRIPES, Layout
from .ops import ring_attention_op
from .rotation import ROTATIONS

BATCH_DIM, HEAD_DIM, SEQ_DIM = 0, 1, 2

RotateMethod = Literal["ring", "allgather"]
FLOATING_POINT = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
# Options of scaled_dot_product_attention and FlashAttention at the value that the ring implies.
NO_EFFECT = {"attn_mask": None, "dropout_p": 0.0, "is_causal": True, "window_size": (-1, -1)}


def ring_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mesh: DeviceMesh | None,
    layout: Layout = TOKEN_STRIPES,
    documents: Documents | None = None,
    scale: float | None = None,
    rotate_method: RotateMethod = "ring",
    kernel: str = "auto",
    window: int | None = None,
    sinks: Tensor | None = None,
    **unsupported: object,
) -> Tensor:
    """Exact causal attention over a sequence whose tokens are spread over the ranks of a ring.

    Grouped-query attention follows from the head counts. Every rank of the mesh must call it, with
    the same shapes, dtypes and options.

    Args:
        query: this rank's tokens, (B, H, S/P, D).
        key, value: (B, Hkv, S/P, D), H a multiple of Hkv; dtype and device of the query.
        mesh: one-dimensional mesh of the ring, P ranks; None for a ring of one rank. Or of two
            dimensions, the ring's and "ulysses", whose U ranks share heads (ulysses.py); U
            divides H.
        layout: which rank holds which token; RoPE must use `layout.positions`.
        documents: global boundaries of the documents in this rank's batch rows; None for one each.
        scale: of the logits, above 0; default 1 / sqrt(D).
        rotate_method: "ring" keeps O(S/P) keys and values, "allgather" O(S), with one collective.
        kernel: "auto", "flash", "fa3", "fa4", "cudnn", "flex", "cpu" or "reference".
        window: tokens that a token sees, itself and the window - 1 before it, of its own document;
            at least 1. None: all before it. Not with block stripes. Hops that no rank needs are
            not made (docs/reference/parallelism.md).
        sinks: (H,), for each head a logit that joins the softmax's denominator and no value. Its
            gradient is this rank's share: the sum over the ranks of `mesh` is the whole.
        unsupported: options of other attention functions; refused unless they change nothing.

    DTensors: all three on one device mesh with equal placements. The axes with the names and ranks
    of `mesh`, if there is one, shard the sequence; others may shard batch or heads, or replicate.
    The result is a DTensor with the query's placements. `sinks` may then be plain, or replicated,
    with those of all heads, or sharded as the heads are.

    torch.autocast does not reach inside: convert the three first if they differ in dtype.

    Returns:
        (B, H, S/P, D) in the query's dtype, in memory order (B, S/P, H, D).

    Raises:
        ValueError: shapes, dtypes, devices, placements, sequence length, layout or kernel that
            cannot work: on all ranks alike, before anything is sent.
    """
    check_options(layout, rotate_method, kernel)
    check_unsupported(unsupported)
    if scale is not None and not (
        isinstance(scale, (int, float)) and scale is not True and 0 < scale < math.inf
    ):
        raise ValueError(f"scale = {scale!r}: must be a finite number above 0")
    if documents is not None and not isinstance(documents, Documents):
        raise ValueError(f"documents must be a Documents, not a {type(documents).__name__}")
    if window is not None and (type(window) is not int or window < 1):
        raise ValueError(f"window = {window!r}: must be None or an integer, at least 1")
    if window is not None:
        window = min(window, sys.maxsize)  # of a custom operator's integers
    axes = axes_of(mesh)

    def attend(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None) -> Tensor:
        _check_local(query, key, value, sinks, axes, layout, documents)
        out, _ = ring_attention_op(
            query,
            key,
            value,
            None if documents is None else documents.boundaries,
            layout.spec,
            axes.ring.group_name,
            axes.ulysses.group_name,
            1 / math.sqrt(query.shape[-1]) if scale is None else scale,
            rotate_method,
            kernel,
            window,
            sinks,
        )
        return out

    if not any(isinstance(x, DTensor) for x in (query, key, value)):
        return attend(query, key, value, sinks)
    q, k, v = _check_placements(query, key, value, mesh)
    local_q, local_k, local_v = (x.to_local(grad_placements=x.placements) for x in (q, k, v))
    local_sinks = None if sinks is None else _local_sinks(sinks, q)
    out = attend(local_q, local_k, local_v, local_sinks)
    _, heads, seq_len, dim = q.shape
    stride = (seq_len * heads * dim, dim, heads * dim, 1)
    return DTensor.from_local(
        out, q.device_mesh, q.placements, run_check=False, shape=q.shape, stride=stride
    )


def check_options(layout: Layout, rotate_method: str, kernel: str) -> None:
    """Raise ValueError for a layout, rotate_method or kernel that does not exist."""
    if not isinstance(layout, Layout):
        raise ValueError(
            f"layout = {layout!r}: must be a Layout, as Striped(block_size), HeadTail() and "
            "Contiguous() are"
        )
    for name, value, allowed in (
        ("rotate_method", rotate_method, [*ROTATIONS]),
        ("kernel", kernel, ["auto", *KERNELS]),
    ):
        if value not in allowed:
            raise ValueError(f"{name} = {value!r}: allowed are {', '.join(map(repr, allowed))}")


def check_unsupported(options: Mapping[str, object]) -> None:
    """Raise ValueError for an option that exact causal attention does not have."""
    for name, value in options.items():
        if name not in NO_EFFECT or value != NO_EFFECT[name]:
            shown = "a tensor" if isinstance(value, Tensor) else repr(value)
            raise ValueError(
                f"{name} = {shown} is not supported: attention is causal, within `documents` "
                "if given, in a `window` if given, without masks, biases or dropout"
            )


def _check_local(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor | None,
    axes: Axes,
    layout: Layout,
    documents: Documents | None,
) -> None:
    shapes = f"query {tuple(query.shape)}, key {tuple(key.shape)}, value {tuple(value.shape)}"
    if not query.dim() == key.dim() == value.dim() == 4:
        raise ValueError(f"expected (batch, heads, sequence / P, head_dim) tensors; got {shapes}")
    if key.shape != value.shape or any(
        query.shape[dim] != key.shape[dim] for dim in (BATCH_DIM, SEQ_DIM, -1)
    ):
        raise ValueError(
            f"key and value must have one shape, and the query's but for the heads; got {shapes}"
        )
    if key.shape[HEAD_DIM] == 0 or query.shape[HEAD_DIM] % key.shape[HEAD_DIM]:
        raise ValueError(f"query heads must be a multiple of key heads; got {shapes}")
    if not query.dtype == key.dtype == value.dtype:
        raise ValueError(
            "query, key and value must have one dtype; got "
            f"{query.dtype}, {key.dtype}, {value.dtype}"
        )
    if query.dtype not in FLOATING_POINT:
        raise ValueError(
            f"attention needs float16, bfloat16, float32 or float64; got {query.dtype}"
        )
    if query.shape[-1] == 0:
        raise ValueError(f"head_dim must be at least 1; got {shapes}")
    if not query.device == key.device == value.device:
        raise ValueError(
            "query, key and value must be on one device; got "
            f"{query.device}, {key.device}, {value.device}"
        )
    if sinks is not None:
        _check_sinks(query, sinks)
    # A custom operator has no rule for tangents: torch would take them for zero, silently.
    if any(unpack_dual(x).tangent is not None for x in (query, key, value, sinks) if x is not None):
        raise ValueError("forward-mode differentiation (jvp) of ring attention is not supported")
    if query.shape[HEAD_DIM] % axes.ulysses.size:
        raise ValueError(
            f"{query.shape[HEAD_DIM]} query heads do not divide over the {axes.ulysses.size} ranks "
            "that share heads"
        )
    layout.check(query.shape[SEQ_DIM] * axes.size, axes.size, axes.ulysses.size)
    # The end of the documents is compared with S where the tiles are planned.
    if documents is not None and documents.batch_size != query.shape[BATCH_DIM]:
        raise ValueError(
            f"documents describe {documents.batch_size} batch rows, the query has "
            f"{query.shape[BATCH_DIM]}"
        )


def _check_sinks(query: Tensor, sinks: Tensor) -> None:
    if not isinstance(sinks, Tensor) or isinstance(sinks, DTensor):
        raise ValueError(f"sinks must be a tensor like the query, not a {type(sinks).__name__}")
    heads = query.shape[HEAD_DIM]
    if sinks.shape != (heads,) or sinks.dtype not in FLOATING_POINT or sinks.device != query.device:
        raise ValueError(
            f"sinks must be a floating-point tensor of shape ({heads},), one logit for each query "
            f"head, on {query.device}; got {sinks.dtype} of shape {tuple(sinks.shape)} on "
            f"{sinks.device}"
        )


def _local_sinks(sinks: Tensor, query: DTensor) -> Tensor:
    """Those of this rank's heads; the gradient is summed where ranks have other tokens or heads."""
    mesh, whole = query.device_mesh, (query.shape[HEAD_DIM],)
    if sinks.shape != whole:
        raise ValueError(f"sinks must have shape {whole}, one logit for each query head")
    heads = [
        axis for axis, placement in enumerate(query.placements) if placement == Shard(HEAD_DIM)
    ]
    if isinstance(sinks, DTensor):
        replicated = (Replicate(),) * mesh.ndim
        sharded = tuple(Shard(0) if axis in heads else x for axis, x in enumerate(replicated))
        if sinks.device_mesh != mesh or sinks.placements not in (replicated, sharded):
            raise ValueError(
                f"sinks: placements {sinks.placements!r} cannot work; allowed on the query's mesh: "
                f"{replicated!r} or {sharded!r}"
            )
        grad_placements = [
            own if own == Shard(0) or of_query == Replicate() else Partial()
            for own, of_query in zip(sinks.placements, query.placements, strict=True)
        ]
        already_mine = sinks.placements == sharded
        sinks = sinks.to_local(grad_placements=grad_placements)
        if already_mine:
            return sinks
    for axis in heads:
        sinks = sinks.chunk(mesh.size(axis))[mesh.get_local_rank(axis)]
    return sinks


def _check_placements(
    query: Tensor, key: Tensor, value: Tensor, mesh: DeviceMesh | None
) -> tuple[DTensor, DTensor, DTensor]:
    """The three as DTensors, if the ring can work on their placements."""
    if not (isinstance(query, DTensor) and isinstance(key, DTensor) and isinstance(value, DTensor)):
        raise ValueError("query, key and value must all be DTensors, or none of them")
    axes = query.device_mesh.mesh_dim_names or tuple(map(str, range(query.device_mesh.ndim)))
    sequence: tuple[str, ...] = ()
    if mesh is not None:
        sequence = mesh.mesh_dim_names or ("without a name",)
        for axis in sequence:
            if axis not in axes:
                raise ValueError(
                    f"DTensors must live on a device mesh with the ring's axis {axis!r}; "
                    f"its axes are {axes}"
                )
        if not torch.compiler.is_compiling():  # as in axes_of
            check_order(mesh)
            ranks, wanted = query.device_mesh[sequence].mesh, mesh.mesh
            if not torch.equal(ranks, wanted):
                shown = sequence[0] if len(sequence) == 1 else sequence
                raise ValueError(
                    f"the ring's mesh has ranks {wanted.tolist()}, axis {shown!r} of the DTensors' "
                    f"mesh {ranks.tolist()}"
                )
    for name, x in (("query", query), ("key", key), ("value", value)):
        if x.device_mesh != query.device_mesh or x.placements != query.placements:
            raise ValueError(
                "query, key and value must have one mesh and equal placements; "
                f"{name} has {x.placements!r}, query {query.placements!r}"
            )
        for mesh_axis, placement in zip(axes, x.placements, strict=True):
            is_ring = mesh_axis in sequence
            dims = (SEQ_DIM,) if is_ring else (BATCH_DIM, HEAD_DIM)
            replicated = isinstance(placement, Replicate) and not is_ring
            if not replicated and placement not in [Shard(dim) for dim in dims]:
                allowed = [f"Shard({dim})" for dim in dims] + ["Replicate()"] * (not is_ring)
                raise ValueError(
                    f"{name}: placement {placement!r} on mesh axis {mesh_axis!r} cannot work; "
                    f"allowed: {', '.join(allowed)}"
                )
        if x.shape[HEAD_DIM] % _shards(x, HEAD_DIM):
            raise ValueError(
                f"{name}: {x.shape[HEAD_DIM]} heads do not divide over {_shards(x, HEAD_DIM)} ranks"
            )
        if x.shape[SEQ_DIM] % _shards(x, SEQ_DIM):
            raise ValueError(
                f"{name}: sequence length {x.shape[SEQ_DIM]} is not a multiple of "
                f"{_shards(x, SEQ_DIM)} ranks"
            )
    return query, key, value


def _shards(x: DTensor, dim: int) -> int:
    """Number of pieces that the mesh cuts tensor dimension `dim` into."""
    sizes = zip(x.device_mesh.shape, x.placements, strict=True)
    # A list: torch.compile (2.13) takes no generator here.
    return math.prod([size for size, placement in sizes if placement == Shard(dim)])
