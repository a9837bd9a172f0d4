"""Texts with a question at the end whose answer stands far before it.

Each sample is as long as asked, to the token. Its answer is given (teacher-forced): one forward
pass tells for every token of the answer how probable it was and whether it was the most probable.

- "passkey": a number in repeated noise (Mohtashami and Jaggi, arXiv 2305.16300).
- "needle", "multikey", "multivalue": RULER's niah_single_2, niah_multikey_1 and niah_multivalue
  (arXiv 2404.06654): a number for a word in real text; three more numbers for other words; four
  numbers for one word, all of them asked for.
- "copy": words without sense, then the same words again: what induction heads do.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from recipes.evaluation.haystack import Encoder, Haystack, insert, noise

_NEEDLE = " One of the special magic numbers for {key} is: {value}."
_ONE = (
    "A special magic number is hidden within the following text. Make sure to memorize it. I will "
    "quiz you about the number afterwards.\n",
    "\nWhat is the special magic number for {key} mentioned in the provided text? The special "
    "magic number for {key} mentioned in the provided text is",
)
_MANY = (
    "Some special magic numbers are hidden within the following text. Make sure to memorize it. I "
    "will quiz you about the numbers afterwards.\n",
    "\nWhat are all the special magic numbers for {key} mentioned in the provided text? The "
    "special magic numbers for {key} mentioned in the provided text are",
)
_PASSKEY = (
    "There is an important info hidden inside a lot of irrelevant text. Find it and memorize it. I "
    "will quiz you about the important information there.\n",
    "\nWhat is the pass key? The pass key is",
)
_PASSKEY_NEEDLE = " The pass key is {value}. Remember it. {value} is the pass key."
_ADJECTIVES = "able brave calm dark early fair glad happy icy jolly kind loud mild neat odd proud"
_NOUNS = "apple bridge cloud door engine forest garden house island jacket kettle lamp moon nest"
_VALUES = 4
# Tokens that are hidden with less text than this around them are not far away.
_LEAST_HAY = 16


@dataclass(frozen=True)
class Sample:
    """
    Attributes:
        tokens: int64 (length,).
        answer: int64 (n,): places of the tokens that count.
    """

    tokens: np.ndarray
    answer: np.ndarray


# Length in tokens; depth of the needle, 0 the beginning, 1 the end.
Task = Callable[[Encoder, Haystack, np.random.Generator, int, float], Sample]


def passkey(
    encode: Encoder, hay: Haystack, dice: np.random.Generator, length: int, depth: float
) -> Sample:
    value = _number(dice, 5)
    needle = encode(_PASSKEY_NEEDLE.format(value=value))
    return _assemble(encode, "passkey", length, _PASSKEY, [(depth, needle)], f" {value}")


def multivalue(
    encode: Encoder, hay: Haystack, dice: np.random.Generator, length: int, depth: float
) -> Sample:
    """Four depths drawn at random; `depth` is of no use."""
    (key,) = _keys(dice, 1)
    depths = np.sort(dice.random(_VALUES))
    values = [_number(dice, 7) for _ in depths]
    found = [
        (d, encode(_NEEDLE.format(key=key, value=value)))
        for d, value in zip(depths, values, strict=True)
    ]
    # In the order of the text: a forced answer needs one.
    answer = f" {', '.join(values[:-1])}, and {values[-1]}"
    frame = _MANY[0], _MANY[1].format(key=key)
    text = hay.take(int(dice.integers(len(hay.tokens))), length)
    return _assemble(encode, "multivalue", length, frame, found, answer, text)


def copy(
    encode: Encoder, hay: Haystack, dice: np.random.Generator, length: int, depth: float
) -> Sample:
    """Half of it random words, half the same again."""
    start = encode.bos
    count = (length - len(start)) // 2
    part = encode(copy_words(dice, count))[:count]
    tokens = np.concatenate([start, part, part])
    padding = np.resize(part, length - len(tokens))
    # The first tokens of the second half cannot be known.
    answer = np.arange(len(start) + count + count // 4, len(tokens))
    return Sample(np.concatenate([tokens, padding]), answer)


def copy_words(dice: np.random.Generator, count: int) -> str:
    """Words without sense, `count` of them, each after a space."""
    words = [*_ADJECTIVES.split(), *_NOUNS.split()]
    return "".join(f" {words[i]}" for i in dice.integers(len(words), size=count))


def _needles(
    encode: Encoder,
    hay: Haystack,
    dice: np.random.Generator,
    length: int,
    depth: float,
    task: str,
    distractors: int,
) -> Sample:
    keys = _keys(dice, 1 + distractors)
    values = [_number(dice, 7) for _ in keys]
    depths = [depth, *dice.random(distractors)]
    found = [
        (d, encode(_NEEDLE.format(key=key, value=value)))
        for d, key, value in zip(depths, keys, values, strict=True)
    ]
    frame = _ONE[0], _ONE[1].format(key=keys[0])
    text = hay.take(int(dice.integers(len(hay.tokens))), length)
    return _assemble(encode, task, length, frame, found, f" {values[0]}", text)


# name: (how it is made, whether it has a depth)
TASKS: dict[str, tuple[Task, bool]] = {
    "passkey": (passkey, True),
    "needle": (partial(_needles, task="needle", distractors=0), True),
    "multikey": (partial(_needles, task="multikey", distractors=3), True),
    "multivalue": (multivalue, False),
    "copy": (copy, False),
}


def _assemble(
    encode: Encoder,
    task: str,
    length: int,
    frame: tuple[str, str],
    needles: list[tuple[float, np.ndarray]],
    answer: str,
    text: np.ndarray | None = None,
) -> Sample:
    """Frame, text with needles, question and answer: `length` tokens in all.

    Raises:
        ValueError: there is no room.
    """
    before, after, reply = encode(frame[0]), encode(frame[1]), encode(answer)
    fixed = len(encode.bos) + len(before) + len(after) + len(reply)
    room = length - fixed - sum(len(ids) for _, ids in needles)
    if room < _LEAST_HAY:
        raise ValueError(
            f'evaluation.lengths: {length} tokens are too few for task "{task}", which takes '
            f"{length - room + _LEAST_HAY} with this tokenizer; give greater lengths or other tasks"
        )
    hay = noise(encode, room) if text is None else text[:room]
    body = insert(encode, hay, needles)
    tokens = np.concatenate([encode.bos, before, body, after, reply])
    places = np.arange(length - len(reply), length)
    # A space of its own or a comma is no part of the answer.
    counts = [any(c.isdigit() for c in encode.text(tokens[p : p + 1])) for p in places]
    return Sample(tokens, places[counts])


def _number(dice: np.random.Generator, digits: int) -> str:
    return str(dice.integers(10 ** (digits - 1), 10**digits))


def _keys(dice: np.random.Generator, count: int) -> list[str]:
    """Different words of the form adjective-noun."""
    adjectives, nouns = _ADJECTIVES.split(), _NOUNS.split()
    chosen = dice.choice(len(adjectives) * len(nouns), size=count, replace=False)
    return [f"{adjectives[i // len(nouns)]}-{nouns[i % len(nouns)]}" for i in chosen]
