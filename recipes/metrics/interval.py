"""What a data-parallel rank has done since metrics were logged last."""

import time
from dataclasses import dataclass, field

import torch
from torch.distributed.device_mesh import DeviceMesh

from recipes.data.labels import packing_stats
from recipes.metrics.reduce import max_over, sum_over
from recipes.models.shapes import ModelShape


@dataclass
class Interval:
    """Counts since `began`, of this data-parallel rank; its context-parallel ranks count the same.

    Attributes:
        began: `time.perf_counter()`, put off by what is not training.
        steps, batches, sequences, tokens: how many; tokens include padding.
        pairs: (query, key) pairs that attention computes, the mean over the layers.
        loading_seconds: time spent waiting for batches.
        documents: documents of all sequences, padding not counted as one.
        padding: tokens that are padding.
        longest_document: in tokens.
    """

    began: float = field(default_factory=time.perf_counter)
    steps: int = 0
    batches: int = 0
    sequences: int = 0
    tokens: int = 0
    pairs: float = 0.0
    loading_seconds: float = 0.0
    documents: float = 0.0
    padding: float = 0.0
    longest_document: int = 0

    def count_batch(
        self,
        shape: ModelShape,
        boundaries: torch.Tensor | None,
        tokens: torch.Tensor,
        labels: torch.Tensor,
        loading_seconds: float,
        mask_documents: bool,
    ) -> None:
        """Count a batch as loaded: boundaries (B, N) or None, the rest (B, S), on the host."""
        batch_size, seq_len = labels.shape
        self.batches += 1
        self.sequences += batch_size
        self.tokens += labels.numel()
        self.loading_seconds += loading_seconds
        if boundaries is None or not mask_documents:
            self.pairs += shape.visible_pairs([seq_len] * batch_size)
        else:
            self.pairs += shape.visible_pairs(boundaries.diff(dim=1).numpy())
        if boundaries is not None:
            stats = packing_stats(boundaries, tokens, labels)
            self.documents += stats["documents"] * batch_size
            self.padding += stats["padding_share"] * labels.numel()
            self.longest_document = max(self.longest_document, stats["longest_document"])

    def over(self, mesh: DeviceMesh | None, device: torch.device) -> "Averages":
        """What all ranks that read different data did, per token and sequence. A collective."""
        counts = [self.pairs, self.documents, self.padding, self.tokens, self.sequences]
        sums = torch.tensor(counts, dtype=torch.float64, device=device)
        pairs, documents, padding, tokens, sequences = sum_over(sums, mesh).tolist()
        longest = max_over(torch.tensor(self.longest_document, device=device), mesh)
        return Averages(pairs / tokens, documents / sequences, padding / tokens, int(longest))


@dataclass(frozen=True)
class Averages:
    """Means over the data of all ranks."""

    pairs_per_token: float
    documents_per_sequence: float
    padding_share: float
    longest_document: int
