"""Sequences and document lengths as text for a person: what the model will see."""

import json
from collections.abc import Iterator
from itertools import groupby, islice, pairwise
from operator import itemgetter
from typing import Any

import numpy as np
import torch

from recipes.data.labels import packing_stats
from recipes.data.loader import DocumentLoader
from recipes.data.sources import PreparedSource
from recipes.data.statistics import length_histogram
from recipes.data.streams import Member
from recipes.data.tokens import encode
from recipes.titan import IGNORE_INDEX

# Tokens of either end of a stretch, stretches of a document, and documents of a sequence.
_SHOWN_TOKENS = 12
_SHOWN_STRETCHES = 8
_SHOWN_DOCUMENTS = 8
# Documents whose lengths are looked at where they are not prepared: each has to be tokenized.
_COUNTED_DOCUMENTS = 1000


def sequences_text(loader: DocumentLoader, tokenizer: Any, count: int) -> Iterator[str]:
    """The first sequences, one text each, then what each source of a mixture gave.

    Args:
        loader: of batches of one sequence.
    """
    before = loader.given
    for number, (inputs, labels) in enumerate(islice(loader, count), 1):
        given, names = loader.given, ""
        if len(given) > 1 and not loader.across:
            names = f" of {', '.join(n for n in given if given[n].tokens > before[n].tokens)}"
        before = given
        title = f"sequence {number}{names}: "
        yield title + _sequence_text(inputs["input"][0], labels[0], inputs["boundaries"], tokenizer)
    if len(before) > 1:
        yield _shares_text(loader)


def _sequence_text(
    tokens: torch.Tensor, labels: torch.Tensor, boundaries: torch.Tensor, tokenizer: Any
) -> str:
    stats = packing_stats(boundaries, tokens[None], labels[None])
    total, padding = len(tokens), round(stats["padding_share"] * len(tokens))
    counted = int((labels != IGNORE_INDEX).sum())
    documents = int(stats["documents"])
    lines = [
        f"{documents} documents, {counted:,} of {total:,} tokens count in the loss "
        f"({counted / total:.1%}), {padding:,} are padding"
    ]
    borders = list(pairwise(sorted(set(boundaries[0].tolist()))))[:documents]
    for start, end in borders[:_SHOWN_DOCUMENTS]:
        lines.append(_document_text(tokens[start:end], labels[start:end], start, tokenizer))
    if documents > _SHOWN_DOCUMENTS:
        lines.append(f"  ... and {documents - _SHOWN_DOCUMENTS} more documents")
    return "\n".join(lines)


def _document_text(tokens: torch.Tensor, labels: torch.Tensor, start: int, tokenizer: Any) -> str:
    """One line; [[ ]] are stretches that no token is trained to say."""

    def decoded(ids: list[int]) -> str:
        return json.dumps(tokenizer.decode(ids, skip_special_tokens=False), ensure_ascii=False)[
            1:-1
        ]

    # A token's label is the one after it; the first has its loss, if any, in an earlier sequence.
    learnt = [False, *(labels[:-1] != IGNORE_INDEX).tolist()]
    parts = []
    for is_learnt, stretch in groupby(zip(tokens.tolist(), learnt, strict=True), key=itemgetter(1)):
        ids = [token for token, _ in stretch]
        text = decoded(ids)
        if len(ids) > 2 * _SHOWN_TOKENS:
            text = f"{decoded(ids[:_SHOWN_TOKENS])} ... {decoded(ids[-_SHOWN_TOKENS:])}"
        parts.append(text if is_learnt else f"[[{text}]]")
    more = f" ... and {len(parts) - _SHOWN_STRETCHES} more" if len(parts) > _SHOWN_STRETCHES else ""
    counted = int((labels != IGNORE_INDEX).sum())
    goes_on = ", goes on" if labels[-1] != IGNORE_INDEX else ""
    text = "".join(parts[:_SHOWN_STRETCHES]) + more
    return f"  {start:>9,} {len(tokens):>9,} tokens, {counted:>9,} in the loss{goes_on}: {text}"


def _shares_text(loader: DocumentLoader) -> str:
    given = loader.given
    tokens = sum(one.tokens for one in given.values())
    weights = sum(member.weight for member in loader.members)
    lines = ["source                      weight     share        tokens   epoch"]
    for member, one in zip(loader.members, given.values(), strict=True):
        lines.append(
            f"{member.name:<24}{member.weight / weights:>10.1%}{one.tokens / tokens:>10.1%}"
            f"{one.tokens:>14,}{one.epoch:>8}"
        )
    return "\n".join(lines)


def document_lengths(member: Member, tokenizer: Any) -> tuple[np.ndarray, str]:
    """Tokens of the documents of a source, (documents,) int64, and which ones they are.

    Those that a mixture leaves out are left out; the others are as long as before they are cut.
    """
    which = "all"
    if isinstance(member.source, PreparedSource):
        lengths = member.source.shards.lengths()
    else:
        documents = islice(member.source.documents(0, None, rank=0, degree=1), _COUNTED_DOCUMENTS)
        lengths = np.array([len(encode(tokenizer, x)) for _, x in documents], dtype=np.int64)
        if len(lengths) == _COUNTED_DOCUMENTS:
            which = f"the first {len(lengths):,}"
    most = member.max_tokens or lengths.max()
    return lengths[(lengths >= member.min_tokens) & (lengths <= most)], which


def lengths_text(name: str, lengths: np.ndarray, which: str) -> str:
    """A histogram of document lengths."""
    if not len(lengths):
        return f"{name}: no documents ({which}), min_tokens and max_tokens leave all of them out"
    total = int(lengths.sum())
    lines = [
        f"{name}: {len(lengths):,} documents ({which}), {total:,} tokens, longest "
        f"{lengths.max():,}, median {int(np.median(lengths)):,}",
        "length in tokens            documents   share of tokens",
    ]
    for low, high, count in length_histogram(lengths):
        share = lengths[(lengths >= low) & (lengths < high)].sum() / total
        bar = "#" * round(30 * share)
        lines.append(f"{low:>11,} to {high - 1:>11,} {count:>11,} {share:>16.1%} {bar}".rstrip())
    return "\n".join(lines)
