"""Which files a path means: a file, a folder or a glob of text, JSON Lines and Parquet."""

import glob
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

from recipes.data.records import SUFFIXES


def find_files(path: str) -> list[Path]:
    """The files that `path` names, sorted, so that every rank sees the same order.

    Args:
        path: a file; a folder, searched with its subfolders; or a glob ("**" for any depth).

    Raises:
        ValueError: nothing is found, or a file named outright is of an unknown kind.
    """
    if Path(path).is_dir():
        found = [f for f in Path(path).rglob("*") if f.is_file() and f.name.endswith(SUFFIXES)]
        if not found:
            raise ValueError("the folder has no file of a kind that can be read")
    else:
        # A name first: it may have brackets.
        names = [path] if Path(path).is_file() else glob.glob(path, recursive=True)
        found = [Path(name) for name in names if Path(name).is_file()]
        if not found:
            raise ValueError("no such file")
        for file in found:
            if not file.name.endswith(SUFFIXES):
                raise ValueError(f"{file} is of an unknown kind")
    return sorted(found)


def files_identity(files: Sequence[Path], column: str) -> str:
    """Tells whether a position in these files still means the same: names, sizes, text column."""
    return digest([[[file.name, file.stat().st_size] for file in files], column])


def digest(value: object) -> str:
    """A hash of a JSON value."""
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()
