"""Write docs/reference/settings.md from the schema: every setting, its range and meaning.

python scripts/settings_page.py            # writes the page; a test compares it
"""

from __future__ import annotations

import ast
import inspect
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import MISSING, Field, fields, is_dataclass
from pathlib import Path
from typing import Any, get_type_hints

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "reference" / "settings.md"
HEADING = """# Settings

Written by `python scripts/settings_page.py` from the schema, torchtitan 0.2.2's and that of
recipes/config/schema.py; a test compares. `--section.key value` on the command line overrides the
TOML; switches are `--section.key` and `--section.no_key`, lists of names have commas; tables in
[[ ]] stand in a file only. What settings cannot go with each other stands in
[parallelism](parallelism.md) and [memory](memory.md).
"""


def page() -> str:
    from recipes.config.schema import StripedJobConfig

    tables = list(_sections(StripedJobConfig, ""))
    return HEADING + "".join(f"\n## {name}\n\n{table}" for name, table in tables)


def _sections(schema: type, prefix: str) -> Iterator[tuple[str, str]]:
    """(heading of a TOML table, its rows), nested ones after the one that has them.

    Args:
        prefix: of the keys; ends in ".*." for the entries of an array of tables.
    """
    from recipes.config.types import entry_of
    from recipes.config.values import allowed_values

    meanings, kinds = _meanings(schema), get_type_hints(schema)
    rows, nested = [], []
    for field in fields(schema):
        if is_dataclass(field.type):
            nested.append((field.type, f"{prefix}{field.name}."))
            continue
        if (entry := entry_of(kinds[field.name])) is not None:
            nested.append((entry, f"{prefix}{field.name}.*."))
            continue
        cells = (
            f"`{field.name}`",
            _kind(kinds[field.name]),
            f"`{_default(field)}`",
            allowed_values(prefix + field.name),
            meanings.get(field.name, ""),
        )
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    if rows:
        head = "| key | type | default | allowed | meaning |\n|---|---|---|---|---|\n"
        name = prefix.rstrip(".")
        array = name.removesuffix(".*")
        yield f"[{name}]" if array == name else f"[[{array}]]", head + "\n".join(rows) + "\n"
    for kind, name in nested:
        assert isinstance(kind, type)
        yield from _sections(kind, name)


def _meanings(schema: type) -> dict[str, str]:
    """The text under every field of a class and of those it extends, in one line each."""
    found: dict[str, str] = {}
    for cls in reversed(schema.__mro__[:-1]):
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
        assert isinstance(tree, ast.ClassDef)
        for statement, following in zip(tree.body, [*tree.body[1:], None], strict=True):
            if not (
                isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)
            ):
                continue
            if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
                found[statement.target.id] = " ".join(str(following.value.value).split())
    return found


def _kind(kind: Any) -> str:
    plain = isinstance(kind, type) and not hasattr(kind, "__args__")
    return kind.__name__ if plain else str(kind).replace("typing.", "")


def _default(field: Field) -> str:
    from recipes.config.types import toml

    if field.default is not MISSING:
        return toml(field.default)
    assert field.default_factory is not MISSING
    return toml(field.default_factory())


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    PAGE.write_text(page(), encoding="utf-8")
