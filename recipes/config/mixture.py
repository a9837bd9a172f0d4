"""The sources that a section names: its own, or the entries of its mixture."""

import glob
from pathlib import Path
from typing import Any

from recipes.config.values import get


def sources_of(config: Any, section: str) -> list[str]:
    """The keys of what a section reads: itself, or the entries of its mixture."""
    mixture = getattr(get(config, section), "mixture", ())
    return [f"{section}.mixture.{number}" for number in range(1, len(mixture) + 1)] or [section]


def source_name(config: Any, key: str) -> str:
    """What metrics and messages call the source with this key."""
    data = get(config, key)
    if given := getattr(data, "name", ""):
        return given
    path = data.dataset_path[0] if isinstance(data.dataset_path, list) else data.dataset_path
    parts = [part for part in Path(path or "").parts if not glob.has_magic(part)]
    return (parts[-1] if parts else data.dataset.rpartition("/")[2]).partition(".")[0]


def mixture_names(config: Any) -> list[str]:
    """The names of the sources of training's mixture; none where it has one source."""
    keys = sources_of(config, "training") if config.training.mixture else []
    return [source_name(config, key) for key in keys]
