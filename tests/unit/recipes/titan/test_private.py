"""The table of private names is complete, and the installed versions still have what it says."""

import functools
import importlib
import inspect
import re

import pytest

from recipes.titan.private import REPLACED, USED, Private
from tests import ROOT

TABLE = (*REPLACED, *USED)


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.name)
def test_it_is_there_and_takes_what_is_relied_on(row: Private) -> None:
    module, _, path = row.name.partition(":")
    found = functools.reduce(getattr, path.split("."), importlib.import_module(module))
    if row.takes is not None:
        parameters = [n for n in inspect.signature(found).parameters if n != "self"]
        assert set(row.takes) <= set(parameters), parameters


# A private name that is imported from torch or torchtitan, or patched.
_IMPORTED = re.compile(r"^\s*from (torch[\w.]*) import (.*\b_[a-z]\w*.*)$", re.MULTILINE)
_PATCHED = re.compile(r'mock\.patch\(\s*"([\w.]+)\.(\w+)"')


def test_nothing_private_is_used_that_is_not_in_the_table() -> None:
    named = {row.name.replace(":", ".") for row in TABLE}
    used = set()
    for file in [*(ROOT / "recipes").rglob("*.py"), *(ROOT / "striped_cp").rglob("*.py")]:
        text = file.read_text()
        used |= {".".join(match.groups()) for match in _PATCHED.finditer(text)}
        for module, names in _IMPORTED.findall(text):
            used |= {f"{module}.{n}" for n in re.findall(r"\b_[a-zA-Z]\w*", names)}
    assert used
    assert used <= named


def test_few_files_know_torchtitan() -> None:
    files = [
        file
        for file in (ROOT / "recipes").rglob("*.py")
        if re.search(r"^\s*(from|import) torchtitan", file.read_text(), re.MULTILINE)
    ]
    assert len(files) <= 20
