"""Ranks that do not agree never train: settings, code and data are compared before the first step.

A rank with another learning rate would train on with wrong weights, one with another sequence
length would end the run in a collective, or in a time limit that blames nobody.
"""

import hashlib
import json
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch.distributed as dist

from recipes.config.schema import StripedJobConfig
from recipes.config.types import toml
from recipes.process.faults import Stop

# Where a host keeps its copy of a file is its own affair; what the data are is compared.
_MAY_DIFFER = {
    *("job.config_file", "model.hf_assets_path", "checkpoint.initial_load_path"),
    *("training.dataset_path", "validation.dataset_path", "evaluation.dataset_path"),
    "training.mixture.dataset_path",
    "metrics.disable_color_printing",  # set by each rank, for its own output
}
_ROOT = Path(__file__).parents[2]


def settings_and_code(config: StripedJobConfig) -> dict[str, str]:
    """By key what must be the same on every rank before anything is built."""
    table = _flat(asdict(config))
    code = hashlib.sha256()
    for file in sorted(
        f for room in ("recipes", "striped_cp") for f in _ROOT.glob(f"{room}/**/*.py")
    ):
        code.update(file.read_bytes())
    return {
        **{
            key: toml(value)
            for key, value in table.items()
            if re.sub(r"\.\d+\.", ".", key) not in _MAY_DIFFER
        },
        "the code of recipes and striped_cp": code.hexdigest()[:12],
        **{f"the version of {name}": version(name) for name in ("torch", "torchtitan")},
    }


def _flat(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in table.items():
        key = f"{prefix}{name}"
        if isinstance(value, list) and value and isinstance(value[0], Mapping):
            value = {str(number): entry for number, entry in enumerate(value, 1)}
        flat |= _flat(value, f"{key}.") if isinstance(value, Mapping) else {key: value}
    return flat


def check_agreement(mine: Mapping[str, str]) -> None:
    """Compare what this rank has with all others; a collective of all ranks.

    Raises:
        Stop: on every rank, naming the ranks of the minority, the key and the values.
    """
    digest = hashlib.sha256(json.dumps(mine, sort_keys=True).encode()).hexdigest()
    digests: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(digests, digest)
    if len(set(digests)) == 1:
        return
    tables: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(tables, dict(mine))
    lines = []
    for key in dict.fromkeys(key for table in tables for key in table):
        values = [table.get(key, "nothing") for table in tables]
        # The larger part is right, or where there is none the part of rank 0.
        (usual, _), *others = Counter(values).most_common()
        for value, _ in others:
            ranks = [str(rank) for rank, v in enumerate(values) if v == value]
            lines.append(f"rank {', '.join(ranks)}: {key} = {value}, the others have {usual}")
    raise Stop(f"startup check: the ranks do not agree: {'; '.join(lines[:5])}")
