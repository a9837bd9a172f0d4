"""What far context is worth in real text: loss by position, gain, LongPPL.

Every token is scored twice: with all text before it, and with the last K tokens alone (K to 1.25 K:
windows overlap, as a window for every token would cost K times as much). The difference tells what
the far context gave.

LongPPL (Fang et al., arXiv 2410.23771) is the perplexity over the tokens that need it: those whose
log-probability falls by more than 2 without far context, and is above -2 with it (equations 4 to
7). The paper finds these tokens with a fixed strong model; here it is the model itself.
"""

from dataclasses import dataclass

import numpy as np

from recipes.evaluation.scorer import Scorer

# alpha and beta of the paper, section 3.3.
KEY_GAIN, KEY_LOGPROB = 2.0, -2.0
_FIRST_BUCKET = 32


@dataclass(frozen=True)
class TextScores:
    """Log-probabilities float32 (S,) of a text; `short` is nan where there is no far context."""

    full: np.ndarray
    short: np.ndarray


def score_text(scorer: Scorer, tokens: np.ndarray, short_context: int) -> TextScores:
    """
    Args:
        tokens: int64 (S,).
        short_context: K.
    """
    full = scorer(tokens[None]).logprob[0]
    short = np.full(len(tokens), np.nan, dtype=np.float32)
    starts, width, first = windows(len(tokens), short_context)
    # As many windows at a time as the text itself is long.
    rows = max(len(tokens) // width, 1)
    for i in range(0, len(starts), rows):
        part = starts[i : i + rows]
        scores = scorer(np.stack([tokens[s : s + width] for s in part])).logprob
        for start, row in zip(part, scores, strict=True):
            short[start + first : start + width] = row[first:]
    return TextScores(full, short)


def windows(length: int, short_context: int) -> tuple[list[int], int, int]:
    """Windows that give every token after the first K a context of K to 1.25 K tokens.

    Returns:
        Where they start, how wide they are, and which token of a window is the first that counts.
        No window for a text that is not longer than K.
    """
    if length <= short_context:
        return [], short_context + 1, short_context
    stride = min(max(short_context // 4, 1), length - short_context)
    width = short_context + stride
    starts = [*range(0, length - width, stride), length - width]
    return starts, width, short_context


def summarize(texts: list[TextScores], short_context: int) -> dict:
    """Means over all texts, in nats; `gain` and what follows are None without far context."""
    full = np.stack([text.full for text in texts])[:, 1:]
    short = np.stack([text.short for text in texts])[:, 1:]
    gain = full - short
    far = ~np.isnan(gain)
    key = np.zeros_like(far)
    key[far] = (gain[far] > KEY_GAIN) & (full[far] > KEY_LOGPROB)
    length = texts[0].full.shape[0]
    return {
        "length": length,
        "sequences": len(texts),
        "loss": float(-full.mean(dtype=np.float64)),
        "short_context": short_context,
        "gain": _mean(gain[far]),
        "key_tokens": int(key.sum()) if far.any() else None,
        "longppl": float(np.exp(-full[key].mean(dtype=np.float64))) if key.any() else None,
        "positions": [
            {
                "first": start,
                "last": end - 1,
                "loss": float(-full[:, start - 1 : end - 1].mean(dtype=np.float64)),
                "gain": _mean(gain[:, start - 1 : end - 1][far[:, start - 1 : end - 1]]),
            }
            for start, end in buckets(length)
        ],
    }


def buckets(length: int) -> list[tuple[int, int]]:
    """Ranges of positions [start, end), each twice as long as the one before; 0 has no loss."""
    edges = [1]
    width = _FIRST_BUCKET
    while width < length:
        edges.append(width)
        width *= 2
    return list(zip(edges, [*edges[1:], length], strict=True))


def _mean(values: np.ndarray) -> float | None:
    return float(values.mean(dtype=np.float64)) if values.size else None
