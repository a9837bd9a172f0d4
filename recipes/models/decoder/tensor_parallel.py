"""Tensor parallelism with sequence parallelism between the matrix products.

torchtitan's plan (0.2.2, `models/llama3/infra/parallelize.py`) but for two modules that take their
tokens in chunks: the feed-forward layer adds its partial sums up once for all chunks, and the
output projection may return a loss.
"""

import torch
from torch import nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from recipes.memory.loss import LossHeadParallel


class EmbeddingParallel(RowwiseParallel):
    """Shards an embedding over the vocabulary, and waits for its output.

    torch 2.13 loses the gradient of an AsyncCollectiveTensor that enters a compiled block: with
    torchtitan 0.2.2's plan the embedding learns nothing where `compile.components` has "model".
    """

    @staticmethod
    def _prepare_output_fn(output_layouts, use_local_output, mod, outputs, device_mesh):
        outputs = RowwiseParallel._prepare_output_fn(
            output_layouts, use_local_output, mod, outputs, device_mesh
        )
        return _Wait.apply(outputs)


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: torch.Tensor) -> torch.Tensor:
        return x.wait() if isinstance(x, AsyncCollectiveTensor) else x.view_as(x)

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> torch.Tensor:
        return grad


def apply_tensor_parallel(model: nn.Module, mesh: DeviceMesh, *, loss_parallel: bool) -> None:
    """Shard the heads, the feed-forward layers and the vocabulary over the ranks of a mesh.

    Args:
        loss_parallel: logits stay sharded over the vocabulary for a loss that can take them so.
    """
    parallelize_module(
        model,
        mesh,
        {
            "tok_embeddings": EmbeddingParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "norm": SequenceParallel(),
            "output": LossHeadParallel(
                input_layouts=Shard(1),
                output_layouts=Shard(-1) if loss_parallel else Replicate(),
                use_local_output=not loss_parallel,
            ),
        },
    )
    # On heads: (B, S, H/tp, D).
    head_norm = SequenceParallel(sequence_dim=2, use_local_output=True)
    for block in model.get_submodule("layers").children():
        norms = {
            f"attention.{name}": head_norm
            for name in ("q_norm", "k_norm")
            if isinstance(block.get_submodule(f"attention.{name}"), nn.RMSNorm)
        }
        parallelize_module(
            block,
            mesh,
            {
                **norms,
                "attention_norm": SequenceParallel(),
                # Rotations, documents and positions are no DTensors.
                "attention": PrepareModuleInput(
                    input_layouts=(Shard(1), None, None, None),
                    desired_input_layouts=(Replicate(), None, None, None),
                ),
                "attention.wq": ColwiseParallel(),
                "attention.wk": ColwiseParallel(),
                "attention.wv": ColwiseParallel(),
                "attention.wo": RowwiseParallel(output_layouts=Shard(1)),
                "ffn_norm": SequenceParallel(),
                "feed_forward": PrepareModuleInputOutput(
                    input_layouts=(Shard(1),),
                    desired_input_layouts=(Replicate(),),
                    output_layouts=(Partial(),),
                    desired_output_layouts=(Shard(1),),
                ),
                "feed_forward.w1": ColwiseParallel(),
                "feed_forward.w2": RowwiseParallel(output_layouts=Partial()),
                "feed_forward.w3": ColwiseParallel(),
            },
        )
