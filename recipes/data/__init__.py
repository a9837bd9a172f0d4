"""Documents of any length to batches of packed sequences.

sources (files, prepared shards, Hugging Face datasets) -> tokens -> packing -> samples -> loader.
"""

from typing import Any

from recipes.data.dataset import build_source, check_documents
from recipes.data.loader import DocumentLoader
from recipes.data.samples import packing_stats

__all__ = [
    "DocumentLoader",
    "build_dataloader",
    "build_validation_dataloader",
    "packing_stats",
]


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
    """The loader of [validation]; every `iter()` of it yields the same batches."""
    return _build("validation", dp_world_size, dp_rank, tokenizer, job_config, infinite)


def _build(
    section: str, dp_degree: int, dp_rank: int, tokenizer: Any, config: Any, infinite: bool
) -> DocumentLoader:
    data = getattr(config, section)
    source = build_source(config, section, tokenizer)
    check_documents(source, section, dp_degree)
    return DocumentLoader(
        source,
        tokenizer,
        dp_rank=dp_rank,
        dp_degree=dp_degree,
        seq_len=data.seq_len,
        batch_size=data.local_batch_size,
        packing=config.documents.packing,
        mask=config.documents.mask,
        infinite=infinite,
        num_workers=data.dataloader.num_workers,
        prefetch_factor=data.dataloader.prefetch_factor or 2,
    )
