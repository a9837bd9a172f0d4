"""cuDNN's fused attention, one dense block per call."""

from __future__ import annotations

import torch
from torch import Tensor

from ..blocks import Pass
from .base import BackwardInputs, Inputs, Request
from .dense import DenseKernel, refuse_16_bit_cuda
from .reference import ReferenceKernel

aten = torch.ops.aten
# cuDNN does not take one key, which torch's own choice of a kernel knows (2.13, sdp_utils.cpp).
_ONE_KEY = ReferenceKernel()


class CudnnKernel(DenseKernel):
    name = "cudnn"
    device_type: str | None = "cuda"

    def refuse(self, request: Request) -> str | None:
        reason = refuse_16_bit_cuda(request, max_head_dim=128)
        if reason is None and request.packed:
            return "it takes dense blocks only, and documents need variable-length calls"
        strict = not torch.is_deterministic_algorithms_warn_only_enabled()
        if reason is None and strict and torch.are_deterministic_algorithms_enabled():
            # torch's own choice of a kernel knows that, its operator does not ask (2.13).
            return (
                "its backward is not deterministic, which torch.use_deterministic_algorithms asks"
            )
        return reason

    def attend(self, x: Inputs, of: Pass, scale: float) -> tuple[Tensor, Tensor]:
        if x.key.shape[2] == 1:
            return _ONE_KEY.attend(x, of, scale)
        out, lse, *_ = aten._scaled_dot_product_cudnn_attention(
            *x, None, True, 0.0, of.triangular, False, scale=scale
        )
        return out, lse.view(x.query.shape[:3])  # some versions return (B, H, n, 1)

    def attend_backward(
        self, x: BackwardInputs, of: Pass, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        if x.key.shape[2] == 1:
            return _ONE_KEY.attend_backward(x, of, scale)
        # Without dropout the kernel reads no random state.
        philox = torch.zeros((), dtype=torch.int64, device=x.query.device)
        return aten._scaled_dot_product_cudnn_attention_backward(
            x.grad_out,
            *x[:4],
            x.lse.contiguous().unsqueeze(-1),
            philox,
            philox,
            None,
            None,
            None,
            x.query.shape[2],
            x.key.shape[2],
            0.0,
            of.triangular,
            scale=scale,
        )
