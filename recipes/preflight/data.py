"""Refuse data settings that cannot work, before any process group exists."""

import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from recipes.checkpoint.files import checkpoint_to_load, read_metadata
from recipes.config.mixture import sources_of
from recipes.config.schema import MixtureSource
from recipes.config.types import InvalidSetting
from recipes.config.values import get
from recipes.data.dataset import build_source, check_documents
from recipes.data.files import find_files
from recipes.data.loader import REMEDY, check_degree
from recipes.data.readers import SUFFIXES
from recipes.data.shards import is_shard_folder
from recipes.data.sources import PreparedSource
from recipes.data.startup import check_fit
from recipes.data.tokens import Tokenizer
from recipes.titan import DATASETS

# Neither part begins with a dot: a name is no path out of its folder.
_HUB_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]*/[A-Za-z0-9_-][A-Za-z0-9_.-]*")
_NAMES = '"sample", "local" with dataset_path, {}, or owner/name of a Hugging Face dataset'


def check_data(config: Any, dp_degree: int) -> None:
    """Check the data of a run, and the checkpoint from which its data would go on.

    Raises:
        InvalidSetting: an unknown dataset, files that are not there, or options that do not apply.
        ValueError: documents, a prepared folder or a checkpoint that do not fit the run.
    """
    for section, ranks in (("training", dp_degree), ("validation", 1), ("evaluation", 1)):
        if section == "training" or getattr(config, section).enable:
            keys = sources_of(config, section)
            for key in keys:
                _check_settings(config, key)
            _check_documents(config, section, keys, ranks)
    check_checkpoint_position(config, dp_degree)


def _check_settings(config: Any, section: str) -> None:
    data = get(config, section)
    name, path = data.dataset, data.dataset_path
    if name == "local":
        _check_path(section, path)
    elif name != "sample" and name not in DATASETS and not _HUB_NAME.fullmatch(name):
        allowed = _NAMES.format(", ".join(f'"{n}"' for n in DATASETS))
        raise InvalidSetting(f"{section}.dataset", name, "unknown dataset", allowed)
    elif path is not None and name not in DATASETS:
        why = f"dataset is {name!r}, which has no path"
        raise InvalidSetting(f"{section}.dataset_path", path, why, 'with dataset = "local"')
    prepared = name == "local" and is_shard_folder(path)
    fixed = prepared or name == "sample" or name in DATASETS
    if data.text_column != "text" and fixed:
        why = f"dataset {'is prepared' if prepared else repr(name)}, its text is known"
        raise InvalidSetting(f"{section}.text_column", data.text_column, why, '"text"')
    for key, default in (("dataset_subset", None), ("dataset_split", "train")):
        value = getattr(data, key)
        if value != default and (name in ("local", "sample") or name in DATASETS):
            why = f"dataset is {name!r}"
            raise InvalidSetting(f"{section}.{key}", value, why, "with a Hugging Face dataset")
    seed = config.documents.shuffle_seed
    if section.startswith("training") and seed is not None and not prepared:
        allowed = "with a folder that scripts/prepare_documents.py wrote"
        why = f"needs prepared documents, {section} has others"
        raise InvalidSetting("documents.shuffle_seed", seed, why, allowed)


def _check_documents(config: Any, section: str, keys: Sequence[str], dp_degree: int) -> None:
    """Look into the files. The hub's are left to the loader: to open them takes long."""
    here = [key for key in keys if get(config, key).dataset in ("local", "sample")]
    if not here:
        return
    tokenizer = Tokenizer(config.model.hf_assets_path)
    sources = []
    for key in here:
        source = build_source(config, key, tokenizer)
        check_documents(source, key, dp_degree)
        data = get(config, key)
        if isinstance(data, MixtureSource) and isinstance(source, PreparedSource):
            _check_lengths(data, key, source.shards.lengths())
        sources.append(source)
    if here == [*keys]:
        check_fit(config, section, sources, tokenizer)


def _check_lengths(data: MixtureSource, key: str, lengths: np.ndarray) -> None:
    """That the filter of a mixture leaves something of a prepared folder."""
    for name, limit, none_left in (
        ("min_tokens", data.min_tokens, lengths.max() < (data.min_tokens or 0)),
        ("max_tokens", data.max_tokens, lengths.min() > (data.max_tokens or np.inf)),
    ):
        if none_left:
            allowed = f"what leaves some of its documents of {lengths.min()} to {lengths.max()}"
            raise InvalidSetting(f"{key}.{name}", limit, "leaves out every document", allowed)


def _check_path(section: str, path: str | list[str] | None) -> None:
    key = f"{section}.dataset_path"
    allowed = (
        f"a file, a folder or a glob of {', '.join(SUFFIXES)}, a list of them, or a folder that "
        "scripts/prepare_documents.py wrote"
    )
    if path is None:
        raise InvalidSetting(key, path, 'dataset is "local"', allowed)
    if not is_shard_folder(path):
        for one in [path] if isinstance(path, str) else path:
            if is_shard_folder(one):
                why = f"{one} is a prepared folder, which stands alone"
                raise InvalidSetting(key, path, why, allowed)
        try:
            find_files(path)
        except ValueError as error:
            raise InvalidSetting(key, path, str(error), allowed) from None


def check_checkpoint_position(config: Any, dp_degree: int) -> None:
    """Check the data-parallel degree of the checkpoint that the run is about to load, if any.

    torchtitan 0.2.2 would stop too, but late and with "Missing key in checkpoint state_dict:
    dataloader.dp_rank_1", or drop the positions of ranks that are gone.

    Raises:
        ValueError: the checkpoint has another degree, or was written by another data loader.
    """
    found = checkpoint_to_load(config)
    excluded = "dataloader" in config.checkpoint.exclude_from_loading
    if found is None or found.weights_only or excluded:
        return
    folder = found.folder
    keys = read_metadata(folder).state_dict_metadata
    saved = [key for key in keys if re.fullmatch(r"dataloader\.dp_rank_\d+\.place", key)]
    if not saved and any(key.startswith("dataloader.") for key in keys):
        raise ValueError(
            f"{folder}: its positions in the data were written by another data loader; resume it "
            f"with that one, {REMEDY}"
        )
    if saved:
        try:
            check_degree(len(saved), dp_degree)
        except ValueError as error:
            raise ValueError(f"{folder}: {error}") from None
