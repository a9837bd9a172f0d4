"""Model shapes: parameters, matrix work and attention work of a decoder.

Counts are exact, so that a test can hold them against the modules that training builds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from striped_cp.blocks import causal_pairs


@dataclass(frozen=True)
class ModelShape:
    """Dimensions of a decoder-only transformer with SwiGLU and grouped-query attention.

    Attributes:
        norm_eps: of every RMSNorm.
        qk_norm: queries and keys of every head are normalised before they are rotated.
        qkv_bias: the projections of query, key and value have a bias.
        tied: the embedding is the output projection too.
        windows: sliding windows of the layers, repeated over them: tokens that a token sees, itself
            included, or None for all before it. (4096, None): every second layer sees all.
    """

    dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    ffn_dim: int
    vocab_size: int
    head_dim: int = 128
    norm_eps: float = 1e-5
    qk_norm: bool = False
    qkv_bias: bool = False
    tied: bool = False
    windows: tuple[int | None, ...] = (None,)

    def window(self, layer: int) -> int | None:
        """The sliding window of a layer, counted from 0."""
        return self.windows[layer % len(self.windows)]

    @property
    def layers_by_window(self) -> Counter[int | None]:
        """How many layers have each window."""
        return Counter(self.window(layer) for layer in range(self.n_layers))

    @property
    def windowed(self) -> bool:
        """Whether some layer has a sliding window."""
        return set(self.layers_by_window) != {None}

    def visible_pairs(self, lengths: Sequence[int] | np.ndarray) -> float:
        """Visible (query, key) pairs of documents of these lengths, the mean over the layers."""
        each = np.asarray(lengths, dtype=np.int64)
        pairs = {w: int(causal_pairs(each, w).sum()) for w in self.layers_by_window}
        return sum(n * pairs[w] for w, n in self.layers_by_window.items()) / self.n_layers

    @property
    def query_dim(self) -> int:
        """Width of q and of the attention output: n_heads * head_dim."""
        return self.n_heads * self.head_dim

    @property
    def kv_dim(self) -> int:
        """Width of k, and of v: n_kv_heads * head_dim."""
        return self.n_kv_heads * self.head_dim

    @property
    def mlp_matrix_parameters(self) -> int:
        """Parameters of w1, w2 and w3 of one layer."""
        return 3 * self.dim * self.ffn_dim

    @property
    def matrix_parameters(self) -> int:
        """Parameters of all matrices of one layer: those of the MLP, wq, wk, wv and wo."""
        return self.mlp_matrix_parameters + self.dim * (2 * self.query_dim + 2 * self.kv_dim)

    @property
    def layer_parameters(self) -> int:
        """Parameters of one transformer block, norms and biases included."""
        vectors = 2 * self.dim
        vectors += 2 * self.head_dim * self.qk_norm
        vectors += (self.query_dim + 2 * self.kv_dim) * self.qkv_bias
        return self.matrix_parameters + vectors

    @property
    def embedding_parameters(self) -> int:
        """Parameters of the token embedding; the output projection has as many."""
        return self.vocab_size * self.dim

    @property
    def parameters(self) -> int:
        """Parameters of the whole model."""
        ends = (1 if self.tied else 2) * self.embedding_parameters
        return ends + self.n_layers * self.layer_parameters + self.dim

    def training_flops_per_token(self, keys: float) -> float:
        """FLOPs of a token that is given so many keys, forward and backward, nothing twice.

        6 per parameter that is multiplied with: the token embedding is looked up, the output
        projection counts also where they are one matrix. In attention 12 per key, unit of width
        and layer. torchtitan (0.2.2, `get_dense_model_nparams_and_flops`) gives every token S keys,
        the full square of attention; "causal" counts the pairs that a token may look at, in its
        document and the layer's window: at 1M tokens of one document about half of it.
        """
        linear = 6.0 * (
            self.n_layers * self.layer_parameters + self.dim + self.embedding_parameters
        )
        return linear + 3 * self.n_layers * self.attention_forward_flops(1) * keys

    def attention_forward_flops(self, pairs: float) -> float:
        """Forward FLOPs of one layer's attention over `pairs` visible (query, key) pairs.

        Two matrix products of 2 * head_dim FLOPs per pair and query head. The backward pass does
        2.5 times as many: five products (FlashAttention-2, arXiv 2307.08691, section 4.1).
        """
        return 4.0 * self.query_dim * pairs
