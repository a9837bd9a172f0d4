"""Model shapes: parameters, matrix work and attention work of a LLaMA-style transformer.

Counts are exact, so that a test can hold them against the modules that training builds.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ModelShape:
    """Dimensions of a decoder-only transformer with SwiGLU and grouped-query attention."""

    dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    ffn_dim: int
    vocab_size: int
    head_dim: int = 128

    @property
    def query_dim(self) -> int:
        """Width of q and of the attention output: n_heads * head_dim."""
        return self.n_heads * self.head_dim

    @property
    def kv_dim(self) -> int:
        """Width of k, and of v: n_kv_heads * head_dim."""
        return self.n_kv_heads * self.head_dim

    @property
    def attention_matrix_parameters(self) -> int:
        """Parameters of wq, wk, wv and wo of one layer."""
        return self.dim * (2 * self.query_dim + 2 * self.kv_dim)

    @property
    def mlp_matrix_parameters(self) -> int:
        """Parameters of w1, w2 and w3 of one layer."""
        return 3 * self.dim * self.ffn_dim

    @property
    def layer_parameters(self) -> int:
        """Parameters of one transformer block, its two norms included."""
        return self.attention_matrix_parameters + self.mlp_matrix_parameters + 2 * self.dim

    @property
    def embedding_parameters(self) -> int:
        """Parameters of the token embedding; the output projection has as many."""
        return self.vocab_size * self.dim

    @property
    def parameters(self) -> int:
        """Parameters of the whole model; embedding and output projection are two matrices."""
        return 2 * self.embedding_parameters + self.n_layers * self.layer_parameters + self.dim

    def linear_flops_per_token(self) -> float:
        """Training FLOPs per token outside attention: 6 per parameter, token embedding excluded.

        This is the linear term of torchtitan's `get_dense_model_nparams_and_flops` (0.2.2).
        """
        return 6.0 * (self.parameters - self.embedding_parameters)

    def attention_forward_flops(self, pairs: float) -> float:
        """Forward FLOPs of one layer's attention over `pairs` visible (query, key) pairs.

        Two matrix products of 2 * head_dim FLOPs per pair and query head. The backward pass does
        2.5 times as many: five products (FlashAttention-2, arXiv 2307.08691, section 4.1).
        """
        return 4.0 * self.query_dim * pairs


# Meta's published dimensions: Llama 3 (arXiv 2407.21783, table 3) and Llama 3.2 for 1B and 3B. A
# test holds them against the flavors that training builds.
SHAPES: dict[str, ModelShape] = {
    "debugmodel": ModelShape(128, 4, 8, 4, 384, 2048, head_dim=16),
    "1B": ModelShape(2048, 16, 32, 8, 8192, 128256, head_dim=64),
    "3B": ModelShape(3072, 28, 24, 8, 8192, 128256),
    "8B": ModelShape(4096, 32, 32, 8, 14336, 128256),
    "70B": ModelShape(8192, 80, 64, 8, 28672, 128256),
    "405B": ModelShape(16384, 126, 128, 8, 53248, 128256),
}


def causal_pairs(seq_len: int) -> float:
    """Visible (query, key) pairs of one causal document of `seq_len` tokens."""
    return seq_len * (seq_len + 1) / 2


def document_pairs(lengths: tuple[int, ...]) -> float:
    """Visible pairs of documents packed into one sequence, none seeing another."""
    return sum(causal_pairs(length) for length in lengths)
