"""Mean loss of the tokens that see little before them, of those that see much, and between.

A model that uses its context predicts better the more of it there is: the curve falls. Where it
turns up again, positions are new to the model, or its RoPE settings are wrong for them.
"""

from typing import NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh

from recipes.metrics.reduce import sum_over
from recipes.titan import IGNORE_INDEX

# The first bucket: below it, loss is all about the beginning of a document.
_FIRST_EDGE = 64


class Bucket(NamedTuple):
    """Tokens that see `first` to `last` tokens of their document before them.

    Attributes:
        loss: their mean loss.
        share: their part of all tokens that have a label.
    """

    first: int
    last: int
    loss: float
    share: float

    @property
    def name(self) -> str:
        return f"{self.first}-{self.last}"


class LossByPosition:
    """Sums of losses and numbers of labels in buckets whose bounds double: 0-63, 64-127, ...

    Sums stay on the device in float64 until they are read.
    """

    def __init__(self, seq_len: int, device: torch.device | str) -> None:
        edges = [_FIRST_EDGE]
        while edges[-1] < seq_len:
            edges.append(2 * edges[-1])
        self._bounds = list(zip([0, *edges], edges, strict=False))
        self._edges = torch.tensor(edges, device=device)
        self._sums = torch.zeros(2, len(edges), dtype=torch.float64, device=device)

    def add(self, losses: list[torch.Tensor], context: torch.Tensor, labels: torch.Tensor) -> None:
        """
        Args:
            losses: (b, S/P) each, together (B, S/P), 0 where there is no label; none on the
                pipeline stages that do not know them.
            context: int64 (1 or B, S/P), number of tokens that each token sees before it.
            labels: int64 (B, S/P), -100 where there is none.
        """
        if not losses:
            return
        bucket = torch.bucketize(context, self._edges, right=True).expand_as(labels).flatten()
        # A pipeline runs its stages once more before its first step, to learn the shapes.
        of_batch = torch.cat(losses)[-len(labels) :]
        values = torch.stack([of_batch.double(), (labels != IGNORE_INDEX).double()])
        self._sums.index_add_(1, bucket, values.flatten(1))

    def take(self, mesh: DeviceMesh | None) -> list[Bucket]:
        """Buckets of all ranks of a mesh that have labels; begins anew. A collective."""
        sums = sum_over(self._sums, mesh)
        (losses, counts), total = sums.tolist(), float(sums[1].sum())
        self._sums.zero_()
        return [
            Bucket(first, edge - 1, loss / count, count / total)
            for (first, edge), loss, count in zip(self._bounds, losses, counts, strict=True)
            if count
        ]
