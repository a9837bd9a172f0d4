"""From packed pieces to tensors: inputs, labels, boundaries, and what they say about a batch."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch

from recipes.data.packing import Packed
from recipes.data.targets import are_targets, token_ids

IGNORE = -100
PAD = 0

# Least width of a row of boundaries.
_MIN_WIDTH = 8


class Sample(NamedTuple):
    """One sequence: input (S,) and labels (S,) int64; boundaries 0 = c0 < c1 < ... <= S."""

    input: torch.Tensor
    labels: torch.Tensor
    boundaries: list[int]


def build_sample(packed: Packed, seq_len: int, mask: bool) -> Sample:
    """Lay pieces one after another; pad at the tail.

    The label of a token is the token that follows it, if that one is learned (see `targets`). With
    `mask` no label crosses a border: the last token of a document (its EOS, if the tokenizer has
    one) has none, and EOS itself is the last target; a document that goes on in another sequence
    keeps the target of its last token here. Without `mask` the sequence is one text and labels
    cross borders. Padding has no labels and is a document of its own.
    """
    tokens = np.full(seq_len, PAD, np.int64)
    labels = np.full(seq_len, IGNORE, np.int64)
    boundaries = [0]
    for index, piece in enumerate(packed.pieces):
        start = boundaries[-1]
        end = start + len(piece.tokens)
        following = piece.following
        if not mask and following is None:
            last = index + 1 == len(packed.pieces)
            following = packed.following if last else int(packed.pieces[index + 1].tokens[0])
        tokens[start:end] = token_ids(piece.tokens)
        inside = piece.tokens[1:]
        labels[start : end - 1] = np.where(are_targets(inside), inside, IGNORE)
        if following is not None and following >= 0:
            labels[end - 1] = following
        boundaries.append(end)
    if boundaries[-1] < seq_len:
        boundaries.append(seq_len)
    return Sample(torch.from_numpy(tokens), torch.from_numpy(labels), boundaries)


def collate(samples: Sequence[Sample]) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Samples to a batch.

    Returns:
        ({"input": (B, S), "boundaries": (B, N)}, labels (B, S)), all int64. Rows of boundaries are
        padded by repeating S, and N is a power of two, so that a compiled model meets few shapes.
    """
    longest = max(len(sample.boundaries) for sample in samples)
    width = max(_MIN_WIDTH, 1 << (longest - 1).bit_length())
    rows = [s.boundaries + s.boundaries[-1:] * (width - len(s.boundaries)) for s in samples]
    inputs = {
        "input": torch.stack([sample.input for sample in samples]),
        "boundaries": torch.tensor(rows, dtype=torch.int64),
    }
    return inputs, torch.stack([sample.labels for sample in samples])


def packing_stats(
    boundaries: torch.Tensor, tokens: torch.Tensor, labels: torch.Tensor
) -> dict[str, Any]:
    """What a batch holds, for the metrics.

    A last document of nothing but padding tokens, without any target, is padding.

    Args:
        boundaries: (B, N) int64, CPU.
        tokens, labels: (B, S) int64, CPU, as loaded (before they are sharded).

    Returns:
        documents: documents per sequence, mean over the rows (parts count as documents).
        longest_document: tokens of the longest one.
        padding_share: padding tokens / all tokens.
    """
    documents = padding = longest = 0
    for row, row_tokens, row_labels in zip(boundaries.tolist(), tokens, labels, strict=True):
        borders = sorted(set(row))
        lengths = [end - start for start, end in pairwise(borders)]
        last = slice(borders[-2], None)
        if bool((row_labels[last] == IGNORE).all() and (row_tokens[last] == PAD).all()):
            padding += lengths.pop()
        documents += len(lengths)
        longest = max([longest, *lengths])
    return {
        "documents": documents / len(boundaries),
        "longest_document": longest,
        "padding_share": padding / labels.numel(),
    }
