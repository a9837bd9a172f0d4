"""recipes/titan/README.md lists what is private to others and used here: all of it, as it is."""

import importlib
import inspect
import re
from typing import Any, NamedTuple

import pytest

from tests import ROOT
from tests.helpers.foreign_names import Uses, overridden, product_files

PAGE = ROOT / "recipes/titan/README.md"


class Row(NamedTuple):
    name: str
    arguments: str  # "(a, b, *, c)"; "": none are relied on
    files: tuple[str, ...]


def rows_of_page() -> list[Row]:
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    cells = [[cell.strip(" `") for cell in line.strip("| ").split("|")] for line in lines]
    return [Row(name, given, tuple(files.split("`, `"))) for name, given, files, *_ in cells]


ROWS = rows_of_page()


def found(name: str) -> Any:
    """The object of a dotted name; a string where its class only says that instances have it."""
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        try:
            owner = importlib.import_module(".".join(parts[:count]))
        except ModuleNotFoundError:
            continue
        for part in parts[count:]:
            if inspect.isclass(owner) and not hasattr(owner, part):
                assert re.search(rf"\b{part}\b", inspect.getsource(owner)), name
                return part
            owner = getattr(owner, part)
        return owner
    raise AssertionError(name)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_is_there_and_takes_its_arguments(row: Row) -> None:
    there = found(row.name)
    if not row.arguments:
        return
    positional, _, by_name = row.arguments.strip("()").partition("*")
    names = [name for name in positional.split(", ") if name]
    signature = inspect.signature(there)
    assert list(signature.parameters)[: len(names)] == names
    signature.bind(*names, **{name: name for name in by_name.split(", ") if name})


def listed(name: str) -> str:
    """The name of the line that a use of `name` is of; `name` itself if there is none."""
    # A class is known by several modules: its methods by the last two parts of their name.
    method = re.search(r"(?<=\.)[A-Z]\w*\.\w+$", name)
    tail = name if "." not in name else method[0] if method else None
    for row in ROWS:
        if name == row.name or name.startswith(f"{row.name}."):
            return row.name
        if tail is not None and row.name.endswith(f".{tail}"):
            return row.name
    return name


def test_every_use_is_listed_and_no_other() -> None:
    uses = {file.relative_to(ROOT).as_posix(): Uses(file.read_text()) for file in product_files()}
    ours = set().union(*(use.defined for use in uses.values()))
    theirs = {name.rpartition(".")[2] for name, *_ in ROWS}
    in_code = {(listed(name), file) for name, file, _ in overridden()}
    for file, use in uses.items():
        inherited = use.inherited - (ours - theirs)
        names = use.private | use.replaced | inherited
        in_code |= {(listed(name), file) for name in names}
    on_page = {(row.name, file) for row in ROWS for file in row.files}
    assert in_code - on_page == set()
    assert on_page - in_code == set()


def test_overrides_take_what_is_given_to_them() -> None:
    for name, _, ours in overridden():
        assert list(inspect.signature(ours).parameters) == list(
            inspect.signature(found(name)).parameters
        ), name


def test_only_one_room_replaces_names_of_others() -> None:
    replacing = {file for file in product_files() if Uses(file.read_text()).replaced}
    assert {file.parent for file in replacing} == {ROOT / "recipes/titan"}


def test_few_files_know_torchtitan() -> None:
    knowing = [
        file
        for file in product_files()
        if any(name.partition(".")[0] == "torchtitan" for name in Uses(file.read_text()).imports)
    ]
    assert len(knowing) <= 20, knowing


@pytest.mark.parametrize(
    ("source", "private", "replaced"),
    [
        ("from torch.a import _b", {"torch.a._b"}, set()),
        ("import torch._a.b", {"torch._a.b"}, set()),
        ("import torch as t\nx = t.a._b.c", {"torch.a._b.c"}, set()),
        ("from torch import ops\nx = ops.y\nx._z()", {"torch.ops.y._z"}, set()),
        ("def f(x): return x._y", {"_y"}, set()),
        ("def f(x): return getattr(x, '_y', None)", {"_y"}, set()),
        ("class A:\n    def f(self, x): self._y = x._y", set(), set()),
        ("import os\nos._exit(1)", set(), set()),
        ("mock.patch('torch.a._b', 1)", {"torch.a._b"}, {"torch.a._b"}),
        ("from torch import a\npatch.object(a, 'b', 1)", set(), {"torch.a.b"}),
        ("import torch\nsetattr(torch.a, 'b', 1)", set(), {"torch.a.b"}),
        ("from torch import a\na.b = 1", set(), {"torch.a.b"}),
        ("a = importlib.import_module('torch.a')\na.b = 1", set(), {"torch.a.b"}),
    ],
)
def test_uses_are_found(source: str, private: set[str], replaced: set[str]) -> None:
    uses = Uses(source)
    assert (uses.private, uses.replaced) == (private, replaced)
