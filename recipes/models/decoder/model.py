"""A decoder whose attention sees documents and knows the positions of its tokens.

torchtitan's LLaMA-3, with heads of any width, and where a family has them norms of queries and
keys, biases of their projections, sliding windows, and an embedding that is the output projection
too.

Parameter names are torchtitan's, so its checkpoints and its Hugging Face adapter fit. In shapes: B
batch, S sequence, P context-parallel ranks, H heads of this rank, D head dimension.
"""

import contextlib

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torchtitan.models.attention import ScaledDotProductAttentionWrapper
from torchtitan.models.llama3.model import model as titan

from recipes.memory.loss import LossHead
from recipes.memory.mlp import ChunkedFeedForward
from recipes.memory.offload import CheckpointOffload
from recipes.models.decoder.args import TransformerModelArgs
from recipes.models.decoder.rope import apply_rotations, rotations
from recipes.titan import cpu_host
from striped_cp import Documents, RingAttention


class InnerAttention(ScaledDotProductAttentionWrapper):
    """Attention without context parallelism: a ring of one rank for documents, windows and named
    kernels.

    torch's own choice of kernel serves plain causal attention with `kernel` "auto". With context
    parallelism `StripedContextParallel` replaces the forward of this module.
    """

    def __init__(self, kernel: str) -> None:
        super().__init__()
        self.kernel = kernel
        self.ring = RingAttention(mesh=None, kernel=kernel)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        documents: Documents | None = None,
        window: int | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        if documents is None and window is None and self.kernel == "auto":
            return super().forward(query, key, value, enable_gqa=enable_gqa)
        return self.ring(
            query, key, value, documents=documents, window=window, enable_gqa=enable_gqa
        )


class Attention(titan.Attention):
    def __init__(self, model_args: TransformerModelArgs, window: int | None) -> None:
        super().__init__(model_args)
        self.window = window
        shape = model_args.shape
        self.head_dim = shape.head_dim
        self.rotates_halves = model_args.family.rotates_halves
        self.wq = nn.Linear(shape.dim, shape.query_dim, bias=shape.qkv_bias)
        self.wk = nn.Linear(shape.dim, shape.kv_dim, bias=shape.qkv_bias)
        self.wv = nn.Linear(shape.dim, shape.kv_dim, bias=shape.qkv_bias)
        self.wo = nn.Linear(shape.query_dim, shape.dim, bias=False)
        self.q_norm, self.k_norm = (
            nn.RMSNorm(shape.head_dim, eps=shape.norm_eps) if shape.qk_norm else nn.Identity()
            for _ in range(2)
        )
        self.inner_attention = InnerAttention(model_args.kernel)

    def init_weights(self, init_std: float) -> None:
        super().init_weights(init_std)
        for projection in (self.wq, self.wk, self.wv):
            if projection.bias is not None:
                nn.init.zeros_(projection.bias)
        for norm in (self.q_norm, self.k_norm):
            if isinstance(norm, nn.RMSNorm):
                norm.reset_parameters()

    def forward(
        self,
        x: torch.Tensor,
        rotation: torch.Tensor,
        documents: Documents | None,
        positions: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """
        Args:
            x: (B, S/P, dim).
            rotation: complex64 (1 or B, S/P, 1, D/2), of this rank's positions.
            documents: of the whole sequence, or None for one document a row.
            positions: unused; torchtitan's TransformerBlock passes four arguments.

        Returns:
            (B, S/P, dim).
        """
        batch, length, _ = x.shape
        # -1: tensor parallelism has left this rank a part of the heads.
        query = self.wq(x).view(batch, length, -1, self.head_dim)
        key = self.wk(x).view(batch, length, -1, self.head_dim)
        value = self.wv(x).view(batch, length, -1, self.head_dim)
        query, key = (
            apply_rotations(norm(x), rotation, self.rotates_halves)
            for norm, x in ((self.q_norm, query), (self.k_norm, key))
        )
        out_BHSD = self.inner_attention(
            query.transpose(1, 2),
            key.transpose(1, 2),
            value.transpose(1, 2),
            documents=documents,
            window=self.window,
            enable_gqa=self.enable_gqa,
        )
        return self.wo(out_BHSD.transpose(1, 2).reshape(batch, length, -1))


class TransformerBlock(titan.TransformerBlock):
    def __init__(self, layer_id: int, model_args: TransformerModelArgs) -> None:
        super().__init__(layer_id, model_args)
        self.attention = Attention(model_args, model_args.shape.window(layer_id))
        self.feed_forward = ChunkedFeedForward(
            dim=model_args.dim,
            hidden_dim=4 * model_args.dim,
            multiple_of=model_args.multiple_of,
            ffn_dim_multiplier=model_args.ffn_dim_multiplier,
            chunk_tokens=model_args.memory.mlp_chunk_tokens,
        )


class Transformer(titan.Transformer):
    def __init__(self, model_args: TransformerModelArgs) -> None:
        super().__init__(model_args)
        self.model_args: TransformerModelArgs = model_args
        self.layers = nn.ModuleDict(
            {str(i): TransformerBlock(i, model_args) for i in range(model_args.n_layers)}
        )
        memory = model_args.memory
        self.offload = CheckpointOffload() if memory.offload_checkpoints else None
        if memory.loss_chunk_tokens:
            self.output = LossHead(model_args.dim, model_args.vocab_size, memory.loss_chunk_tokens)
        self.tie()

    def tie(self) -> None:
        """Make the two ends one parameter, where the family does.

        Needed again after what gives every module parameters of its own: tensor parallelism, and
        `to_empty` of a model on the meta device.
        """
        if self.model_args.shape.tied:
            self.output.weight = self.tok_embeddings.weight

    def init_weights(self, buffer_device: torch.device | None = None) -> None:
        self.tie()
        if cpu_host.is_cpu_host() and any(isinstance(p, DTensor) for p in self.parameters()):
            cpu_host.init_weights_as_one(self, lambda: Transformer(self.model_args))
        else:
            super().init_weights(buffer_device)

    def _precompute_freqs_cis(self) -> torch.Tensor:
        """Empty: torchtitan's table of every position would take 512 MiB at 1M tokens."""
        return torch.empty(0)

    def forward(
        self,
        tokens: torch.Tensor,
        attention_masks: Documents | None = None,
        positions: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """
        Args:
            tokens: int64 (B, S/P), or hidden states (B, S/P, dim) of the previous pipeline stage.
            attention_masks: documents of the whole sequence, under torchtitan's name.
            positions: int64 (1 or B, S/P), global position of every local token; None: 0 to S - 1.
            labels: int64 (B, S/P), for a loss that the model computes itself
                (`memory.loss_chunk_tokens`); of no effect otherwise.

        Returns:
            (B, S/P, V) logits, the sum of the losses, or hidden states for the next stage.
        """
        hidden = self.tok_embeddings(tokens) if self.tok_embeddings is not None else tokens
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device)[None]
        rotation = rotations(self.model_args.rope, self.model_args.shape.head_dim, positions)
        if self.offload is not None:
            self.offload.start()
        for block in self.layers.values():
            with self.offload.block(hidden) if self.offload else contextlib.nullcontext():
                hidden = block(hidden, rotation, attention_masks, positions)
        hidden = self.norm(hidden) if self.norm is not None else hidden
        if isinstance(self.output, LossHead):
            return self.output(hidden, labels=labels)
        return self.output(hidden) if self.output is not None else hidden
