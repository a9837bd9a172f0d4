"""Log-probability of every token of a text, on any number of context-parallel ranks."""

import contextlib
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from recipes.config.schema import StripedJobConfig
from recipes.data.batch import BatchSharder
from recipes.parallel.ring import seq_len_divisor
from recipes.titan import ParallelDims, device_type, dist_utils
from striped_cp import unshard_sequence

# Logits exist for this many tokens at a time: 0.5 GB in bfloat16 for Llama-3's vocabulary.
_CHUNK_TOKENS = 2048


class Scores(NamedTuple):
    """Of tokens int64 (B, S), each given those before it; the first of a row has none.

    logprob: float32 (B, S), 0 for the first. correct: bool (B, S): the most probable one.
    """

    logprob: np.ndarray
    correct: np.ndarray


class Scorer:
    """Runs a model that is spread over ranks as its training does, without gradients."""

    def __init__(
        self, config: StripedJobConfig, parallel_dims: ParallelDims, model: nn.Module
    ) -> None:
        self.sharder = BatchSharder(config, parallel_dims)
        self.divisor = seq_len_divisor(config)
        self.model = model
        self.context = dist_utils.get_train_context(
            parallel_dims.tp_enabled and not config.parallelism.disable_loss_parallel
        )
        self.amp = dist_utils.maybe_enable_amp(
            parallel_dims, config.training.mixed_precision_param, device_type
        )

    @torch.no_grad()
    def __call__(self, tokens: np.ndarray) -> Scores:
        """
        Args:
            tokens: int64 (B, S), the same on all ranks of a context- or tensor-parallel group.
        """
        length = tokens.shape[1]
        padding = -length % self.divisor
        # Behind everything that counts, padding changes nothing: attention is causal.
        inputs = torch.from_numpy(np.pad(tokens, ((0, 0), (0, padding))))
        labels = inputs.roll(-1, dims=1)
        microbatch = self.sharder.shard({"input": inputs}, labels).to(device_type)
        with _scoring_head(self.model, microbatch.labels), self.context(), self.amp:
            scores = self.model(microbatch.tokens, **microbatch.kwargs)
        if self.sharder.cp_mesh is not None:
            mesh, layout = self.sharder.cp_mesh, self.sharder.layout
            scores = unshard_sequence(scores, mesh=mesh, layout=layout, dim=2)
        # Scores stand where a token is predicted, one before the token.
        logprob, correct = scores[:, :, : length - 1].cpu().numpy()
        return Scores(
            np.pad(logprob, ((0, 0), (1, 0))), np.pad(correct.astype(bool), ((0, 0), (1, 0)))
        )


@contextlib.contextmanager
def _scoring_head(model: nn.Module, labels: torch.Tensor) -> Iterator[None]:
    """Let the output projection return scores in place of logits or a loss.

    Its `forward` is replaced, not the module: FSDP's and tensor parallelism's hooks stay, and
    gather the weight as in training.
    """
    head = model.get_submodule("output")

    def forward(hidden: torch.Tensor, **_: object) -> torch.Tensor:
        return _score(hidden, head.get_parameter("weight"), labels)

    before = head.forward
    head.forward = forward
    try:
        yield
    finally:
        head.forward = before


def _score(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """float32 (2, B, S/P): log-probability of the label, and 1 where it is the largest.

    Args:
        hidden: (B, S/P, dim), weight: (V, dim); DTensors under tensor parallelism.
        labels: int64 (B, S/P).
    """
    scores = torch.empty(2, *labels.shape, dtype=torch.float32, device=labels.device)
    for start in range(0, labels.shape[1], _CHUNK_TOKENS):
        chunk = slice(start, start + _CHUNK_TOKENS)
        logits = torch.nn.functional.linear(hidden[:, chunk], weight)
        if isinstance(logits, DTensor):
            logits = logits.full_tensor()
        logits = logits.float()
        of_label = logits.gather(-1, labels[:, chunk, None])[..., 0]
        scores[0, :, chunk] = of_label - logits.logsumexp(-1)
        scores[1, :, chunk] = of_label == logits.amax(-1)
    return scores
