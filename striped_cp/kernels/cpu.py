"""torch's FlashAttention for CPUs; grouped-query heads included."""

from __future__ import annotations

import torch
from torch import Tensor

from .base import Request
from .dense import DenseKernel

aten = torch.ops.aten


class CpuKernel(DenseKernel):
    name = "cpu"

    def refuse(self, request: Request) -> str | None:
        if request.device_type != "cpu":
            return f"it runs on the CPU, the tensors are on {request.device_type!r}"
        return None

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        return aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, causal, scale=scale
        )

    def attend_backward(
        self,
        grad_out: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        lse: Tensor,
        causal: bool,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        return aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad_out, query, key, value, out, lse, 0.0, causal, scale=scale
        )
