"""A feed-forward layer whose intermediates exist for one chunk of tokens at a time.

SwiGLU's three intermediates are 3.5 times as wide as Llama-3-8B's hidden states: 10.5 GiB for the
131,072 tokens that each of 8 ranks holds of 1M. No token looks at another, so the layer can run
chunk after chunk (`memory.mlp_chunk_tokens`; "tiled MLP" in ALST, arXiv 2506.13996). Every chunk is
an activation checkpoint of its own: its intermediates are gone when the next one starts, also in
the backward pass, where they are computed again.
"""

import torch
from torch.utils.checkpoint import checkpoint
from torchtitan.models.llama3.model.model import FeedForward


class ChunkedFeedForward(FeedForward):
    """torchtitan's SwiGLU layer over chunks of tokens; 0 tokens: all of them at once."""

    def __init__(self, *args, chunk_tokens: int, **kwargs):
        super().__init__(*args, **kwargs)
        self.chunk_tokens = chunk_tokens

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(B, S/P, dim) to (B, S/P, dim).

        Under tensor parallelism each rank returns its part of a sum over the ranks, which is added
        up once for all chunks (`recipes.models.decoder.tensor_parallel`): adding it up chunk by
        chunk would spread every chunk, not the sequence, over the ranks.
        """
        feed_forward = super().forward
        if not self.chunk_tokens:
            return feed_forward(x)
        # Nothing in here draws random numbers.
        chunks = [
            checkpoint(feed_forward, chunk, use_reentrant=False, preserve_rng_state=False)
            for chunk in x.flatten(0, 1).split(self.chunk_tokens)
        ]
        return torch.cat(chunks).unflatten(0, x.shape[:2])
