"""Floating-point operations of training, in two conventions.

Both count forward and backward, and nothing that is computed twice to save memory. They differ in
attention: torchtitan counts the full S x S square of every sequence, "causal" only the (query, key)
pairs that a token may look at, in its document and the layer's window. At 1M tokens of one document
the first is nearly twice the second.
"""

from dataclasses import dataclass

import torch

from recipes.models.decoder.args import TransformerModelArgs
from recipes.models.shapes import ModelShape


@dataclass(frozen=True)
class Flops:
    """FLOPs of one model; all ranks together.

    Attributes:
        linear: per token, outside attention: 6 per parameter but for the token embedding.
        per_pair: per (query, key) pair: 2 products of head_dim forward, 4 backward, in every head
            and layer, 2 FLOPs per multiplication and addition.
        seq_len: S.
    """

    linear: float
    per_pair: float
    seq_len: int

    @classmethod
    def of_model(cls, args: TransformerModelArgs, flops_per_token: float, seq_len: int) -> "Flops":
        """From the model's own count (`get_nparams_and_flops`), S keys a token."""
        per_pair = 12.0 * args.n_layers * args.shape.query_dim
        return cls(flops_per_token - per_pair * seq_len, per_pair, seq_len)

    @property
    def per_token_torchtitan(self) -> float:
        return self.linear + self.per_pair * self.seq_len

    def per_token_causal(self, pairs_per_token: float) -> float:
        return self.linear + self.per_pair * pairs_per_token


def visible_pairs(
    shape: ModelShape, boundaries: torch.Tensor | None, batch_size: int, seq_len: int
) -> float:
    """(query, key) pairs that attention computes for a batch: L (L + 1) / 2 per document.

    Of these those in the window of a layer; the mean over the layers.

    Args:
        boundaries: int64 (B, N) as `striped_cp.Documents` has them; None: one document a row.
    """
    if boundaries is None:
        return shape.visible_pairs([seq_len] * batch_size)
    return shape.visible_pairs(boundaries.diff(dim=1).numpy())
