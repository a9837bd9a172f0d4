"""Attention in plain torch: any device, any dtype up to float64. For tests, not for speed.

Materialises the scores of one block. Backward is FlashAttention's (arXiv 2205.14135, section 3):
P = exp(scale * Q K^T - lse), dV = P^T dO, dS = P * (dO V^T - rowsum(dO * O)).
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..blocks import Pass
from .base import BackwardInputs, Inputs, Request
from .dense import DenseKernel


class ReferenceKernel(DenseKernel):
    name = "reference"
    device_type: str | None = None

    def refuse(self, request: Request) -> str | None:
        return None

    def attend(self, x: Inputs, of: Pass, scale: float) -> tuple[Tensor, Tensor]:
        scores = _scores(x.query, x.key, of.triangular, scale)
        lse = scores.logsumexp(-1)
        out = (scores - lse.unsqueeze(-1)).exp() @ _per_query_head(x.value, x.query)
        return out.to(x.query.dtype), lse

    def attend_backward(
        self, x: BackwardInputs, of: Pass, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value, out, lse, grad_out = x
        dtype = lse.dtype
        probs = (_scores(query, key, of.triangular, scale) - lse.unsqueeze(-1)).exp()
        grad = grad_out.to(dtype)
        delta = (grad * out.to(dtype)).sum(-1, keepdim=True)
        dscores = probs * (grad @ _per_query_head(value, query).transpose(-1, -2) - delta) * scale
        dq = dscores @ _per_query_head(key, query)
        dk = dscores.transpose(-1, -2) @ query.to(dtype)
        dv = probs.transpose(-1, -2) @ grad
        kv_heads = (key.shape[1], query.shape[1] // key.shape[1])
        dk, dv = (x.unflatten(1, kv_heads).sum(2) for x in (dk, dv))
        return dq.to(query.dtype), dk.to(key.dtype), dv.to(value.dtype)


def _per_query_head(x: Tensor, query: Tensor) -> Tensor:
    dtype = torch.promote_types(x.dtype, torch.float32)
    return x.to(dtype).repeat_interleave(query.shape[1] // x.shape[1], dim=1)


def _scores(query: Tensor, key: Tensor, causal: bool, scale: float) -> Tensor:
    key = _per_query_head(key, query)
    scores = scale * query.to(key.dtype) @ key.transpose(-1, -2)
    if causal:
        future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(future, float("-inf"))
    return scores
