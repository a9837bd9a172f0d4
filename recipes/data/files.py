"""Which files a path means: files, folders and globs of the kinds that can be read."""

import glob
import hashlib
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from recipes.data.readers import SUFFIXES, has_index
from recipes.data.shards import is_shard_folder

# Text that lies in folders of data and is none; the last ones are those of `datasets` and MDS.
_ABOUT = re.compile(
    r"(readme|licen[cs]e|notice|copying|changelog|citation)\b"
    r"|(dataset_info|dataset_dict|state|index)\.json$",
    re.IGNORECASE,
)


class Found(NamedTuple):
    """What a search found, sorted, so that every rank sees the same order.

    left_out: files of searched folders that are not read: of another kind, hidden, about the data,
    or a preparation of them.
    """

    files: list[Path]
    left_out: list[Path]

    def told(self) -> str:
        """What was left out, in one line; empty where nothing was."""
        names = ", ".join(str(path) for path in self.left_out[:3])
        more = ", ..." if len(self.left_out) > 3 else ""
        return f"{len(self.left_out)} files left out: {names}{more}" if names else ""


def find_files(paths: str | Sequence[str]) -> Found:
    """The files that one or several paths name.

    Args:
        paths: each a file; a folder, searched with its subfolders; or a glob ("**" for any depth).

    Raises:
        ValueError: nothing is found, or a file named outright is of an unknown kind.
    """
    found: set[Path] = set()
    left_out: set[Path] = set()
    for path in [paths] if isinstance(paths, str) else paths:
        if Path(path).is_dir():
            inside = {file for file in Path(path).rglob("*") if file.is_file()}
            data = {
                file
                for file in inside
                if _is_data(file.relative_to(path)) and not is_shard_folder(str(file.parent))
            }
            if not data:
                raise ValueError(f"{path}: the folder has no file of a kind that can be read")
            left_out |= inside - data - {f.with_suffix(".idx") for f in data if has_index(f)}
        else:
            # A name first: it may have brackets.
            names = [path] if Path(path).is_file() else glob.glob(path, recursive=True)
            data = {Path(name) for name in names if Path(name).is_file()}
            if not data:
                raise ValueError(f"{path}: no such file")
            for file in sorted(data):
                if not file.name.endswith(SUFFIXES):
                    raise ValueError(f"{file} is of an unknown kind")
        found |= data
    return Found(sorted(found), sorted(left_out - found))


def _is_data(path: Path) -> bool:
    hidden = any(part.startswith(".") for part in path.parts)
    return path.name.endswith(SUFFIXES) and not hidden and not _ABOUT.match(path.name)


def files_identity(files: Sequence[Path], column: str) -> str:
    """Tells whether a position in these files still means the same: names, sizes, text column."""
    return digest([[[file.name, file.stat().st_size] for file in files], column])


def digest(value: object) -> str:
    """A hash of a JSON value."""
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()
