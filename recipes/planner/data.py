"""The documents that a run packs into a sequence, from prepared folders."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

from recipes.config.mixture import sources_of
from recipes.config.schema import StripedJobConfig
from recipes.config.values import get
from recipes.data.dataset import member_of
from recipes.data.loader import DocumentLoader
from recipes.data.shards import is_shard_folder, read_manifest
from recipes.data.sources import PreparedSource
from recipes.data.streams import Member
from recipes.models.registry import shape_of

# Enough for a mean, and read in a second.
_SEQUENCES = 64


def typical_documents(config: StripedJobConfig, folder: str = "") -> tuple[tuple[int, ...], str]:
    """Lengths of the documents of one sequence, and a line that says where they are from.

    The first sequences are packed as the run packs them; of these it is the one whose visible pairs
    are nearest to their mean. Padding is a document, as in training.

    Args:
        folder: prepared documents. Empty: those that the settings name, in a mixture's shares.

    Raises:
        ValueError: a source is not a prepared folder.
    """
    if folder:
        members = [Member(_prepared("--data", folder, None))]
    else:
        seed = config.documents.shuffle_seed
        members = [
            member_of(config, key, _prepared(key, get(config, key).dataset_path, seed))
            for key in sources_of(config, "training")
        ]
    seq_len = config.training.seq_len
    loader = DocumentLoader(
        members,
        tokenizer=None,  # they are tokenized
        dp_rank=0,
        dp_degree=1,
        seq_len=seq_len,
        vocab_size=shape_of(config).vocab_size,
        batch_size=1,
        packing=config.documents.packing,
        mask=config.documents.mask,
        across=config.training.mixture_packing == "across",
    )
    sequences = []
    for packed, _ in islice(loader.sequences.after(loader.sequences.start()), _SEQUENCES):
        lengths = [len(piece.tokens) for piece in packed.pieces]
        padding = seq_len - sum(lengths)
        sequences.append(tuple(lengths + [padding] * (padding > 0)))
    pairs = shape_of(config).visible_pairs
    mean = sum(map(pairs, sequences)) / len(sequences)
    nearest = min(sequences, key=lambda lengths: abs(pairs(lengths) - mean))
    return nearest, (
        f"{folder or 'the documents of the run'}: {len(sequences)} sequences packed, on average "
        f"{sum(map(len, sequences)) / len(sequences):.1f} documents and "
        f"{mean / pairs((seq_len,)):.1%} of one document's pairs; planned for the sequence "
        f"nearest to that: {len(nearest)} documents, the longest of {max(nearest):,} tokens"
    )


def _prepared(key: str, path: str | list[str] | None, seed: int | None) -> PreparedSource:
    if path is None or not is_shard_folder(path):
        raise ValueError(
            f"{key}: {path} is not a folder that scripts/prepare_documents.py wrote, and says "
            "nothing of lengths; allowed: prepared folders, or --documents LEN,LEN,..."
        )
    folder = Path(str(path))
    return PreparedSource(folder, read_manifest(folder)["tokenizer"]["sha256"], seed)
