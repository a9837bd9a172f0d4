"""The source of documents that a section names, and the loader of its batches."""

from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import datasets

from recipes.config.mixture import source_name, sources_of
from recipes.config.schema import MixtureSource
from recipes.config.types import toml
from recipes.config.values import get
from recipes.data.content import Content, content_of, without_none
from recipes.data.files import digest
from recipes.data.loader import DocumentLoader
from recipes.data.shards import is_shard_folder
from recipes.data.sources import FileSource, HubSource, PreparedSource, Source
from recipes.data.startup import check_fit
from recipes.data.streams import Member
from recipes.data.tokens import tokenizer_identity, vocabulary_of
from recipes.models.registry import shape_of
from recipes.titan import DATASETS, logger

SAMPLE = Path(__file__).parents[2] / "assets" / "corpus" / "austen.jsonl.gz"


def build_source(config: Any, section: str, tokenizer: Any) -> Source:
    """The source of documents that a section, or an entry of its mixture, names.

    `recipes.preflight.data.check_data` has passed.

    Raises:
        ValueError: a prepared folder does not fit the tokenizer, or a dataset cannot be opened.
    """
    data = get(config, section)
    name, path = data.dataset, data.dataset_path
    if name == "sample":
        return FileSource(str(SAMPLE), "text")
    if name == "local" and is_shard_folder(path):
        # Validation reads the same documents every time, in the order of the files.
        seed = config.documents.shuffle_seed if section.startswith("training") else None
        return PreparedSource(Path(path), tokenizer_identity(tokenizer), seed)
    if name == "local":
        return FileSource(path, data.text_column, vocabulary_of(tokenizer))
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
        read = partial(_read_row, column=data.text_column)
    try:
        return HubSource(where, digest([where, *details]), open_dataset(), read)
    except Exception as error:  # `datasets` raises many kinds, among them its own
        # The second line lists what there is to choose from.
        reason = " ".join(str(error).splitlines()[:2])
        if "onfig name" in reason:
            reason += f" ({section}.dataset_subset)"
        raise ValueError(f"{section}.dataset: {where} cannot be opened: {reason}") from error


def _read_row(row: dict[str, Any], column: str) -> Content:
    return content_of({key: without_none(value) for key, value in row.items()}, column)


def tell_of_novels(config: Any, section: str) -> None:
    """Say so where a section measures on the bundled novels and training reads other data."""
    if getattr(config, section).dataset != "sample":
        return
    for key in sources_of(config, "training"):
        name = get(config, key).dataset
        if name != "sample":
            logger.warning(
                f'{section}.dataset = "sample", its default: it measures on the bundled novels, '
                f"while {key}.dataset = {toml(name)}; name the data to measure on"
            )
            return


def check_documents(source: Source, section: str, dp_degree: int) -> None:
    """Read the first document and see that there is one for every data-parallel rank.

    All ranks find the same, so none is left waiting for another that stopped.

    Raises:
        ValueError: too few documents, or the first is bad (say, a wrong text_column).
    """
    documents = [d for _, d in islice(source.documents(0, None, rank=0, degree=1), dp_degree)]
    if not documents:
        raise ValueError(f"{section}.dataset: there is no document in it")
    if len(documents) < dp_degree:
        raise ValueError(
            f"{section}.dataset: {len(documents)} documents are too few for a data-parallel degree "
            f"of {dp_degree}; give more, or lower it by a higher "
            "parallelism.context_parallel_degree"
        )
    documents[0].content()


def build_dataloader(
    dp_world_size: int, dp_rank: int, tokenizer: Any, job_config: Any, infinite: bool = True
) -> DocumentLoader:
    """The loader of [training]: `build_dataloader_fn` of a torchtitan train spec.

    Raises:
        ValueError: the data does not fit this run.
    """
    return _build("training", dp_world_size, dp_rank, tokenizer, job_config, infinite)


def build_validation_dataloader(
    dp_world_size: int, dp_rank: int, tokenizer: Any, job_config: Any, infinite: bool = False
) -> DocumentLoader:
    """The loader of [validation]; every `iter()` of it yields the same batches.

    Every rank packs all documents and takes its part of the sequences: the sequences do not depend
    on the data-parallel degree, and all ranks have equally many batches.
    """
    tell_of_novels(job_config, "validation")
    return _build("validation", dp_world_size, dp_rank, tokenizer, job_config, infinite)


def _build(
    section: str, dp_degree: int, dp_rank: int, tokenizer: Any, config: Any, infinite: bool
) -> DocumentLoader:
    data = getattr(config, section)
    rows, share = data.local_batch_size, slice(None)
    if section == "validation":
        share = slice(dp_rank * rows, (dp_rank + 1) * rows)
        dp_rank, dp_degree, rows = 0, 1, dp_degree * rows
    members = []
    for key in sources_of(config, section):
        source = build_source(config, key, tokenizer)
        check_documents(source, key, dp_degree)
        members.append(member_of(config, key, source, infinite))
    for warning in check_fit(config, section, [m.source for m in members], tokenizer):
        logger.warning(warning)
    return DocumentLoader(
        members,
        tokenizer,
        dp_rank=dp_rank,
        dp_degree=dp_degree,
        seq_len=data.seq_len,
        vocab_size=shape_of(config).vocab_size,
        batch_size=rows,
        packing=config.documents.packing,
        mask=config.documents.mask,
        across=getattr(data, "mixture_packing", "within") == "across",
        loss_on=config.documents.loss_on,
        too_long=config.documents.too_long,
        share=share,
        num_workers=data.dataloader.num_workers,
        prefetch_factor=data.dataloader.prefetch_factor or 2,
    )


def member_of(config: Any, key: str, source: Source, infinite: bool = True) -> Member:
    """`source` as the section or the entry of a mixture with this key has it read."""
    data = get(config, key)
    if not isinstance(data, MixtureSource):
        return Member(source, repeat=infinite)
    return Member(
        source,
        source_name(config, key),
        data.weight,
        min_tokens=data.min_tokens or 1,
        max_tokens=data.max_tokens,
        seq_len=data.seq_len,
        repeat=infinite and data.when_used_up == "repeat",
    )
