"""What `dataset` and its companions in [training] and [validation] mean."""

from functools import partial
from itertools import islice
from operator import itemgetter
from pathlib import Path
from typing import Any

import datasets
from torchtitan.hf_datasets.text_datasets import DATASETS

from recipes.config_types import InvalidSetting
from recipes.data.files import digest, find_files
from recipes.data.records import SUFFIXES, Record
from recipes.data.shards import is_shard_folder
from recipes.data.sources import FileSource, HubSource, PreparedSource, Source
from recipes.data.tokens import tokenizer_identity

SAMPLE = Path(__file__).parents[2] / "assets" / "corpus" / "austen.jsonl.gz"

_NAMES = '"sample", "local" with dataset_path, {}, or owner/name of a Hugging Face dataset'


def check_dataset(config: Any, section: str) -> None:
    """Check the dataset settings of a section ("training" or "validation") against this host.

    Raises:
        InvalidSetting: an unknown dataset, files that are not there, or options that do not apply.
    """
    data = getattr(config, section)
    name, path = data.dataset, data.dataset_path
    if name == "local":
        _check_path(section, path)
    elif name != "sample" and name not in DATASETS and "/" not in name:
        allowed = _NAMES.format(", ".join(f'"{n}"' for n in DATASETS))
        raise InvalidSetting(f"{section}.dataset", name, "unknown dataset", allowed)
    elif path is not None and name not in DATASETS:
        why = f"dataset is {name!r}, which has no path"
        raise InvalidSetting(f"{section}.dataset_path", path, why, 'with dataset = "local"')
    prepared = name == "local" and is_shard_folder(Path(path))
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
    if section == "training" and seed is not None and not prepared:
        allowed = "with a folder that scripts/prepare_documents.py wrote"
        raise InvalidSetting("documents.shuffle_seed", seed, "needs prepared documents", allowed)


def _check_path(section: str, path: str | None) -> None:
    key = f"{section}.dataset_path"
    allowed = (
        f"a file, a folder or a glob of {', '.join(SUFFIXES)}, or a folder that "
        "scripts/prepare_documents.py wrote"
    )
    if path is None:
        raise InvalidSetting(key, path, 'dataset is "local"', allowed)
    if not is_shard_folder(Path(path)):
        try:
            find_files(path)
        except ValueError as error:
            raise InvalidSetting(key, path, str(error), allowed) from None


def build_source(config: Any, section: str, tokenizer: Any) -> Source:
    """The source of documents that a section names. `check_dataset` has passed.

    Raises:
        ValueError: a prepared folder does not fit the tokenizer, or a dataset cannot be opened.
    """
    data = getattr(config, section)
    name, path = data.dataset, data.dataset_path
    if name == "sample":
        return FileSource(str(SAMPLE), "text")
    if name == "local" and is_shard_folder(Path(path)):
        # Validation reads the same documents every time, in the order of the files.
        seed = config.documents.shuffle_seed if section == "training" else None
        return PreparedSource(Path(path), tokenizer_identity(tokenizer), seed)
    if name == "local":
        return FileSource(path, data.text_column)
    if name in DATASETS:
        known = DATASETS[name]
        where, details = path or known.path, [name]
        open_dataset, read = partial(known.loader, where), known.sample_processor
    else:
        where, details = name, [data.dataset_subset, data.dataset_split, data.text_column]
        open_dataset = partial(
            datasets.load_dataset,
            name,
            data.dataset_subset,
            split=data.dataset_split,
            streaming=True,
        )
        read = itemgetter(data.text_column)
    try:
        return HubSource(where, digest([where, *details]), open_dataset(), read)
    except Exception as error:  # `datasets` raises many kinds, among them its own
        reason = str(error).splitlines()[0]
        raise ValueError(f"{section}.dataset: {where} cannot be opened: {reason}") from error


def check_documents(source: Source, dp_degree: int) -> None:
    """Read the first document and see that there is one for every data-parallel rank.

    All ranks find the same, so none is left waiting for another that stopped.

    Raises:
        ValueError: too few documents, or the first is bad (say, a wrong text_column).
    """
    documents = [d for _, d in islice(source.documents(0, None, rank=0, degree=1), dp_degree)]
    if len(documents) < dp_degree:
        raise ValueError(
            f"dataset: {len(documents)} documents are too few for a data-parallel degree of "
            f"{dp_degree}; give more, or lower it by a higher "
            "parallelism.context_parallel_degree"
        )
    if isinstance(documents[0], Record):
        documents[0].text()
