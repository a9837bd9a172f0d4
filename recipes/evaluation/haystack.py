"""Text to hide something in, or to predict, as token ids."""

from itertools import islice
from typing import Any

import numpy as np

from recipes.data.sources import Source
from recipes.data.targets import token_ids
from recipes.titan import logger

# Noise that RULER and the passkey papers repeat (arXiv 2305.16300, 2404.06654).
NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. "
# How far back from its place a needle looks for the end of a sentence, in tokens.
_REACH = 200


class Encoder:
    """Pieces of text to ids, without BOS and EOS, and back."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    def __call__(self, text: str) -> np.ndarray:
        """int64 (n,)."""
        return np.array(self.tokenizer.encode(text, add_bos=False, add_eos=False), dtype=np.int64)

    @property
    def bos(self) -> np.ndarray:
        """int64 (1,), or (0,) for a tokenizer that has none."""
        bos = getattr(self.tokenizer, "bos_id", None)
        return np.array([] if bos is None else [bos], dtype=np.int64)

    def text(self, ids: np.ndarray) -> str:
        return self.tokenizer.decode(ids.tolist())


class Haystack:
    """Documents of a source, one after the other, from the start again when they are read.

    Raises:
        ValueError: the source has no text.
    """

    def __init__(self, encode: Encoder, source: Source, count: int) -> None:
        """
        Args:
            count: tokens that are wanted at most; no more than a few documents over it is read.
        """
        parts: list[np.ndarray] = []
        total = 0
        for _, document in source.documents(0, None, rank=0, degree=1):
            content = document.content()
            ids = content if isinstance(content, np.ndarray) else encode(document.text())
            part = token_ids(ids)
            parts.append(np.asarray(part, dtype=np.int64))
            total += len(part)
            if total >= count:
                break
        if not total:
            raise ValueError("evaluation.dataset: no text in it")
        self.tokens = np.concatenate(parts)
        if len(self.tokens) < count:
            logger.warning(
                f"evaluation.dataset has {len(self.tokens):,} tokens, {count:,} are wanted "
                "(evaluation.texts of the greatest length): the texts repeat each other, and the "
                "gain of far context looks greater than it is; name more data or lower "
                "evaluation.texts or evaluation.lengths"
            )

    def take(self, start: int, count: int) -> np.ndarray:
        """int64 (count,), from `start` on, around the end."""
        return np.take(self.tokens, np.arange(start, start + count), mode="wrap")


def noise(encode: Encoder, count: int) -> np.ndarray:
    """int64 (count,) of the repeated noise sentences."""
    return np.resize(encode(NOISE), count)


def insert(encode: Encoder, hay: np.ndarray, needles: list[tuple[float, np.ndarray]]) -> np.ndarray:
    """Put needles into text, each at the end of the sentence before its depth.

    Args:
        hay: int64 (n,).
        needles: (depth from 0, the beginning, to 1, the end; ids) of each.

    Returns:
        int64 (n + tokens of the needles,).
    """
    parts, last = [], 0
    for depth, needle in sorted(needles, key=lambda item: item[0]):
        place = max(_sentence_end(encode, hay, round(depth * len(hay))), last)
        parts += [hay[last:place], needle]
        last = place
    return np.concatenate([*parts, hay[last:]])


def _sentence_end(encode: Encoder, hay: np.ndarray, place: int) -> int:
    if place in (0, len(hay)):
        return place
    for end in islice(range(place, 0, -1), _REACH):
        if encode.text(hay[end - 1 : end]).rstrip(" \"'").endswith((".", "\n", "!", "?")):
            return end
    return place
