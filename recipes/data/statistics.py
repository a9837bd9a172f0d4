"""What a prepared folder holds: lengths of documents, and how well they pack."""

from collections.abc import Sequence
from itertools import cycle

import numpy as np

from recipes.data.packing import BestFitPacker, Pending

# Packing is tried on so many documents at most: more would take minutes and change little.
_PACKED_DOCUMENTS = 100_000


def length_histogram(lengths: np.ndarray) -> list[tuple[int, int, int]]:
    """Documents by length: (from, below, how many), from and below powers of two."""
    exponents = np.floor(np.log2(lengths)).astype(int)
    counts = np.bincount(exponents)
    first = int(exponents.min())
    return [(1 << e, 2 << e, int(counts[e])) for e in range(first, len(counts))]


def packing_efficiency(lengths: Sequence[int], seq_len: int) -> tuple[float, float]:
    """How "pack" packs documents of these lengths, in this order, over and over as training does.

    Returns:
        (share of the tokens of all sequences that are no padding, share of the documents that are
        longer than a sequence and hence cut).
    """
    lengths = lengths[:_PACKED_DOCUMENTS]
    packer = BestFitPacker(seq_len)
    total = sum(lengths)
    sequences = tokens = 0
    for number, length in enumerate(cycle(lengths)):
        # An array whose elements are all the same one takes no memory, whatever its length.
        epoch = number // len(lengths)
        packer.add(Pending(np.broadcast_to(np.int32(0), (length,)), epoch))
        while (packed := packer.pop(epoch)) is not None:
            sequences += 1
            tokens += sum(len(piece.tokens) for piece in packed.pieces)
        if tokens >= total:
            break
    return tokens / (sequences * seq_len), sum(n > seq_len for n in lengths) / len(lengths)
