"""FlexAttention: any layout and documents in one call per tile, through its block-sparse mask.

The mask is described by block bounds, never by an (S/P) x (S/P) matrix. Backward differentiates the
tile's own (out, lse) with public API only: with w = exp(lse_tile - lse), the final output is
sum(w * out_tile), so d out_tile = w * dO and d lse_tile = w * dO . (out_tile - out).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache, lru_cache

import torch
from torch import Tensor
from torch._C import _SetExcludeDispatchKeyGuard
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from ..tiles import Tile
from .base import BackwardInputs, Inputs, Partial, PartialGradients, Region, Request
from .dense import refuse_old_gpu

BLOCK = 128
_AUTOGRAD = torch._C.DispatchKey.AutogradFunctionality


class FlexKernel:
    name = "flex"
    device_type: str | None = "cuda"

    def refuse(self, request: Request) -> str | None:
        if request.device_type != "cuda":
            return f"FlexAttention has a backward on CUDA only, not on {request.device_type!r}"
        if (reason := refuse_old_gpu()) is not None:
            return reason
        if request.dtype == torch.float64:
            return "it computes in float32, bfloat16 or float16, not float64"
        if request.head_dim < 16:
            return f"head_dim must be at least 16, not {request.head_dim}"
        return None

    def forward(self, x: Inputs, tile: Tile, scale: float) -> Iterator[Partial]:
        if tile.passes:
            out, lse = _attend(x, tile, scale)
            yield Partial(Region(slice(None), 0, x.query.shape[2]), out, lse)

    def backward(self, x: BackwardInputs, tile: Tile, scale: float) -> Iterator[PartialGradients]:
        if not tile.passes:
            return
        leaves = Inputs(*(tensor.detach().requires_grad_() for tensor in x[:3]))
        # A custom op runs below autograd; what it differentiates itself needs autograd again.
        with torch.enable_grad(), _SetExcludeDispatchKeyGuard(_AUTOGRAD, False):
            tile_out, tile_lse = _attend(leaves, tile, scale)
        weight = torch.exp(tile_lse.detach() - x.lse)  # 0 where the tile shows a row nothing
        grad = x.grad_out.to(weight.dtype)
        grad_lse = weight * (grad * (tile_out.detach() - x.out)).sum(-1)
        grad_tile_out = (weight.unsqueeze(-1) * grad).to(tile_out.dtype)
        dq, dk, dv = torch.autograd.grad((tile_out, tile_lse), leaves, (grad_tile_out, grad_lse))
        everything = Region(slice(None), 0, x.query.shape[2])
        yield PartialGradients(everything, everything, dq, dk, dv)


def _attend(x: Inputs, tile: Tile, scale: float) -> tuple[Tensor, Tensor]:
    out, aux = _flex_attention(x.query.device.type)(
        *x,
        block_mask=tile_block_mask(tile, x.query.device),
        scale=scale,
        enable_gqa=x.query.shape[1] != x.key.shape[1],
        return_aux=AuxRequest(lse=True),
    )
    return out, aux.lse


@cache
def _flex_attention(device_type: str) -> Callable:
    # On the CPU only the eager form serves, forward only, for tests. On CUDA it would compute all
    # (S/P)^2 logits: with fullgraph, dynamo raises an error where it would fall back to that.
    return flex_attention if device_type == "cpu" else torch.compile(flex_attention, fullgraph=True)  # type: ignore[return-value]


# The tiles of a batch on a ring of 32, for all its layers. One of 131,072 rows takes 20 MiB.
@lru_cache(maxsize=32)
def tile_block_mask(tile: Tile, device: torch.device) -> BlockMask:
    """BlockMask of the tile: blocks of 128 x 128 rows are skipped, full, or masked by position."""
    q_pos, k_pos = (
        tile.layout.positions(tile.seq_len, tile.world_size, rank)
        for rank in (tile.query_rank, tile.key_rank)
    )
    rows = q_pos.shape[0]
    if tile.documents is None:
        q_doc = k_doc = torch.zeros(1, rows, dtype=torch.int64)
    else:
        bounds = tile.documents.boundaries
        q_doc, k_doc = (
            torch.searchsorted(bounds, x.expand(len(bounds), -1).contiguous(), right=True)
            for x in (q_pos, k_pos)
        )
    # First and last value of each block decide: positions and documents increase along a rank.
    first = torch.arange(0, rows, BLOCK)
    last = (first + BLOCK - 1).clamp(max=rows - 1)
    q_first, q_last, k_first, k_last = q_pos[first], q_pos[last], k_pos[first], k_pos[last]
    qd_first, qd_last = q_doc[:, first, None], q_doc[:, last, None]
    kd_first, kd_last = k_doc[:, None, first], k_doc[:, None, last]
    visible = (k_first <= q_last[:, None]) & (kd_first <= qd_last) & (kd_last >= qd_first)
    one_document = (qd_first == qd_last) & (kd_first == kd_last) & (qd_first == kd_first)
    full = (k_last <= q_first[:, None]) & one_document
    window = tile.seq_len if tile.window is None else tile.window
    visible &= q_first[:, None] - k_last < window
    full &= q_last[:, None] - k_first < window
    # Blocks cut off by the end of the rows go through the mask too.
    whole = last - first == BLOCK - 1
    full &= whole[:, None] & whole

    q_pos, k_pos, q_doc, k_doc = (x.to(device) for x in (q_pos, k_pos, q_doc, k_doc))

    def mask_mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        row = b if q_doc.shape[0] > 1 else b * 0
        distance = q_pos[q] - k_pos[k]
        return (distance >= 0) & (distance < window) & (k_doc[row, k] == q_doc[row, q])

    def ordered(blocks: Tensor) -> tuple[Tensor, Tensor]:
        blocks = blocks[:, None].to(device)
        count = blocks.sum(-1, dtype=torch.int32)
        return count, blocks.int().argsort(dim=-1, descending=True, stable=True).int()

    return BlockMask.from_kv_blocks(
        *ordered(visible & ~full),
        *ordered(full),
        BLOCK_SIZE=BLOCK,
        mask_mod=mask_mod,
        seq_lengths=(rows, rows),
    )
