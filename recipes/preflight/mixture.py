"""Refuse mixtures that contradict themselves; what their sources hold is checked with the data.

Every check raises `InvalidSetting`, as in `recipes.preflight.checks`.
"""

import re
from collections.abc import Callable
from dataclasses import fields

from recipes.config.mixture import mixture_names, sources_of
from recipes.config.schema import DataSource, MixtureSource, StripedJobConfig
from recipes.config.types import InvalidSetting
from recipes.config.values import get


def check_mixture(config: StripedJobConfig, is_set: Callable[[str], bool]) -> None:
    """Check what the entries of [[training.mixture]] say by themselves.

    Args:
        is_set: whether the file or the command line has a key.
    """
    training = config.training
    if training.mixture_packing == "across" and len(training.mixture) < 2:
        why = f"training.mixture has {len(training.mixture)} sources"
        raise InvalidSetting("training.mixture_packing", "across", why, '"within"')
    if not training.mixture:
        return
    for key in (f"training.{field.name}" for field in fields(DataSource)):
        if is_set(key):
            why = "training.mixture names the sources"
            raise InvalidSetting(key, get(config, key), why, "one of the two")
    if all(entry.when_used_up == "stop" for entry in training.mixture):
        why = "every source stops, and ranks would run out of data at different steps"
        key = "training.mixture.1.when_used_up"
        raise InvalidSetting(key, "stop", why, '"repeat" for at least one')
    names = mixture_names(config)
    for number, key in enumerate(sources_of(config, "training")):
        name, before = names[number], names[:number]
        if not re.fullmatch(r"[\w.-]+", name):
            allowed = "letters, digits, _, - and ."
            raise InvalidSetting(f"{key}.name", name, "names a metric", allowed)
        if name in before:
            why = f"training.mixture.{before.index(name) + 1} has the same name"
            raise InvalidSetting(f"{key}.name", name, why, "a name of its own")
        _check_lengths(key, get(config, key), training.seq_len)


def _check_lengths(key: str, entry: MixtureSource, seq_len: int) -> None:
    least, most, cut = entry.min_tokens, entry.max_tokens, entry.seq_len
    if least is not None and most is not None and least > most:
        allowed = f"at most max_tokens = {most}"
        raise InvalidSetting(f"{key}.min_tokens", least, "no document is so long", allowed)
    if cut is not None and cut > seq_len:
        allowed = f"at most {seq_len}, or leave it unset"
        raise InvalidSetting(f"{key}.seq_len", cut, "longer than training.seq_len", allowed)
