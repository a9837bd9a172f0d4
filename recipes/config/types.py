"""Checks of a TOML table and of a command line against the dataclasses of the schema.

torchtitan 0.2.2 does not check types: `context_parallel_degree = "2"` stays a string and
`seq_len = 1e6` a float, and both fail much later, elsewhere.
"""

import difflib
import itertools
import json
import types
from collections.abc import Iterable, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints


class InvalidSetting(ValueError):
    """A setting that cannot be used: which key, its value, why, and what is allowed."""

    def __init__(self, key: str, value: object, why: str, allowed: str) -> None:
        super().__init__(f"{key} = {toml(value)}: {why}; allowed: {allowed}")
        self.key = key


class CannotRun(ValueError):
    """What the model's or the data's own check says, without the name of the file."""


def toml(value: object) -> str:
    """A value as TOML writes it, near enough for a message."""
    try:
        return json.dumps(value)
    except TypeError:
        return str(value)


def choices(values: Iterable[object]) -> str:
    """Values as a list in a message."""
    return ", ".join(toml(value) for value in values)


def entry_of(kind: Any) -> type | None:
    """The schema of the entries where `kind` is an array of tables; None where it is not."""
    (entry,) = get_args(kind) if get_origin(kind) is list else (None,)
    return entry if is_dataclass(entry) and isinstance(entry, type) else None


def check_table(table: dict[str, Any], schema: type, prefix: str = "") -> dict[str, Any]:
    """Check a TOML table against a dataclass, nested tables included.

    The key of an entry of an array of tables has its number, from 1: training.mixture.2.weight.

    Returns:
        The table, with integers made floats where the schema wants floats.
    """
    known = get_type_hints(schema)
    checked: dict[str, Any] = {}
    for name, value in table.items():
        key = prefix + name
        if name not in known:
            raise _unknown_key(key, value, schema)
        kind = known[name]
        if (entry := entry_of(kind)) is not None:
            if not isinstance(value, list) or not all(isinstance(v, dict) for v in value):
                raise InvalidSetting(key, value, "wrong type", f"tables [[{key}]]")
            checked[name] = [
                check_table(v, entry, f"{key}.{number}.") for number, v in enumerate(value, 1)
            ]
        elif is_dataclass(kind):
            assert isinstance(kind, type)
            if not isinstance(value, dict):
                raise InvalidSetting(key, value, "wrong type", f"a table [{key}]")
            checked[name] = check_table(value, kind, f"{key}.")
        elif not _matches(value, kind):
            raise InvalidSetting(key, value, "wrong type or value", _describe(kind))
        else:
            checked[name] = float(value) if kind is float else value
    return checked


def check_options(args: Sequence[str], schema: type) -> None:
    """Check the names of `--section.key value` settings, and that switches have no value.

    Switches are `--section.key` and `--section.no_key`. The parser (tyro) takes dashes as well.

    Raises:
        InvalidSetting: as for a key of a table.
    """
    for i, arg in enumerate(args):
        if not arg.startswith("--") or arg == "--help":
            continue
        name, equals, value = arg[2:].partition("=")
        if not equals and i + 1 < len(args) and not args[i + 1].startswith("--"):
            equals, value = " ", args[i + 1]
        *sections, key = name.replace("-", "_").split(".")
        place: Any = schema
        for depth, section in enumerate(sections):
            kinds = get_type_hints(place)
            _refuse_entries(".".join(sections[: depth + 1]), value, kinds.get(section))
            if not is_dataclass(kinds.get(section)):
                raise _unknown_key(".".join(sections[: depth + 1]), value, place)
            place = kinds[section]
        kinds = get_type_hints(place)
        switch = key if key in kinds else key.removeprefix("no_")
        if switch not in kinds or (switch != key and kinds[switch] is not bool):
            raise _unknown_key(".".join((*sections, key)), value, place)
        kind, full_name = kinds[switch], ".".join((*sections, switch))
        _refuse_entries(full_name, value, kind)
        if equals and kind is bool:
            off = ".".join((*sections, f"no_{switch}"))
            why, allowed = "a switch has no value", f"--{full_name} or --{off}"
            raise InvalidSetting(full_name, value, why, allowed)
        if kind in (int, float) and not _is_number(value, kind):
            raise InvalidSetting(full_name, value, "wrong type or value", _describe(kind))
        more = itertools.takewhile(lambda x: not x.startswith("--"), args[i + 2 :])
        if kind == list[str] and equals == " " and (rest := list(more)):
            allowed = f"--{full_name} {','.join((value, *rest))}"
            raise InvalidSetting(
                full_name, [value, *rest], "a list is written with commas", allowed
            )


def _refuse_entries(key: str, value: object, kind: Any) -> None:
    if entry_of(kind) is not None:
        raise InvalidSetting(key, value, "stands in a file only", f"tables [[{key}]] in the TOML")


def _unknown_key(key: str, value: object, schema: type) -> InvalidSetting:
    """The error for a key that the schema of its section does not have."""
    section, dot, name = key.rpartition(".")
    prefix = section + dot
    known = [f.name for f in fields(schema)]
    close = difflib.get_close_matches(name, known, n=1)
    hint = f"unknown key, did you mean {prefix}{close[0]}?" if close else "unknown key"
    if close and section:
        array, _, number = section.rpartition(".")
        if number.isdecimal():
            allowed = f"the keys of [[{array}]], see docs/reference/settings.md"
        else:
            allowed = f"the keys of [{section}], see train.py --help"
        return InvalidSetting(key, value, hint, allowed)
    return InvalidSetting(key, value, hint, ", ".join(prefix + n for n in known))


def _is_number(text: str, kind: type) -> bool:
    try:
        kind(text)
    except ValueError:
        return False
    return True


def _matches(value: object, kind: Any) -> bool:
    if get_origin(kind) is Literal:
        return any(type(value) is type(choice) and value == choice for choice in get_args(kind))
    if get_origin(kind) in (Union, types.UnionType):
        return any(_matches(value, option) for option in get_args(kind))
    if get_origin(kind) is list:
        (item,) = get_args(kind)
        return isinstance(value, list) and all(_matches(v, item) for v in value)
    if type(value) is int and abs(value) >= 2**63:
        return False  # of more than 64 bits, like a TOML integer must not be
    if kind is float:
        return type(value) in (int, float)
    return type(value) is kind  # not isinstance: True is an int to Python, not to a user


def _describe(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return choices(choice for choice in get_args(kind) if choice != "")
    if get_origin(kind) in (Union, types.UnionType):
        return " or ".join(_describe(k) for k in get_args(kind) if k is not type(None))
    if get_origin(kind) is list:
        return f"a list, each {_describe(*get_args(kind))}"
    return {
        int: 'an integer of 64 bits (1000000, not 1e6 or "1000000")',
        float: "a number, an integer one of 64 bits",
        bool: "true or false",
        str: "a string",
    }[kind]
