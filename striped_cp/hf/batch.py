"""A batch, the same on every rank of a ring, to this rank's tokens and what goes with them."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.functional import pad

from striped_cp import Documents, Layout, Striped, shard_sequence
from striped_cp.axes import axes_of

IGNORE = -100  # transformers' label of tokens that are not to be predicted


@dataclass(frozen=True, eq=False)
class RingBatch:
    """What an enabled model is told of a batch besides its tensors.

    Attributes:
        position_ids: (B, S/P) on the CPU, those that the model must be given.
        fingerprint: of the whole batch, so that ranks with different ones are found out.
    """

    layout: Layout
    mesh_shape: tuple[int, ...]
    documents: Documents | None
    position_ids: Tensor
    fingerprint: int


def shard_batch(
    input_ids: Tensor,
    labels: Tensor | None,
    mesh: DeviceMesh,
    cu_seqlens: Sequence[Sequence[int]] | None = None,
    *,
    layout: Layout | None = None,
) -> dict[str, Any]:
    """Arguments for a model on the ring: `model(**shard_batch(...))`.

    Labels are shifted before they are dealt out, and not across the end of a document; the loss is
    divided by the number of targets of the whole batch. With data parallelism beside the ring, set
    "num_items_in_batch" to the sum over the data-parallel ranks.

    Args:
        input_ids: (B, S), the same on every rank of the ring.
        labels: (B, S), not shifted, -100 where nothing is to be predicted; or None: no loss.
        mesh: of the ring, P ranks; P divides S.
        cu_seqlens: where the documents of each row begin, and S: [[0, 700, 1024], ...];
            None: every row is one document.
        layout: which rank holds which token, that of `enable`; default token stripes.

    Raises:
        ValueError: shapes, documents or a length that do not go together.
    """
    layout = layout or Striped()
    if input_ids.dim() != 2 or (labels is not None and labels.shape != input_ids.shape):
        got = None if labels is None else tuple(labels.shape)
        raise ValueError(
            "input_ids and labels must have one shape (batch, sequence); "
            f"got {tuple(input_ids.shape)} and {got}"
        )
    rows, seq_len = input_ids.shape
    documents = None if cu_seqlens is None else Documents.from_cu_seqlens(cu_seqlens)
    if documents is not None and (documents.batch_size, documents.seq_len) != (rows, seq_len):
        raise ValueError(
            f"cu_seqlens describes {documents.batch_size} rows of {documents.seq_len} tokens, "
            f"input_ids has {rows} of {seq_len}"
        )
    index = torch.arange(seq_len)
    if documents is None:
        positions = index.expand(rows, -1)
    else:
        positions = documents.positions_in_document(index)

    def mine(x: Tensor) -> Tensor:
        return shard_sequence(x, mesh=mesh, layout=layout, dim=1)

    whole = [input_ids, positions] if labels is None else [input_ids, positions, labels]
    fingerprint = 0
    for x in whole:
        fingerprint = zlib.crc32(x.cpu().contiguous().numpy().tobytes(), fingerprint)
    position_ids = mine(positions)
    batch: dict[str, Any] = {
        "input_ids": mine(input_ids),
        "position_ids": position_ids.to(input_ids.device),
        "ring": RingBatch(layout, mesh.shape, documents, position_ids, fingerprint),
    }
    if labels is not None:
        # A token has a target unless the next one begins a document, or there is none.
        last = pad(positions, (0, 1))[:, 1:] == 0
        targets = pad(labels, (0, 1))[:, 1:].masked_fill(last.to(labels.device), IGNORE)
        batch |= {
            "labels": mine(labels),
            "shift_labels": mine(targets),
            "num_items_in_batch": (targets != IGNORE).sum().clamp(min=1),
        }
    return batch


class RingCollator:
    """Collator for Trainer and SFTTrainer: examples to one row of documents, this rank's share.

    Examples have "input_ids"; "labels", or all tokens are targets; and, where one example holds
    several documents, TRL's "seq_lengths" or "position_ids". The row is filled up to a length that
    the ring divides.
    """

    def __init__(
        self, mesh: DeviceMesh, *, layout: Layout | None = None, pad_token_id: int = 0
    ) -> None:
        self.mesh = mesh
        self.layout = layout or Striped()
        self.pad_token_id = pad_token_id

    def __call__(self, examples: Sequence[dict[str, Any]]) -> dict[str, Any]:
        ids: list[int] = []
        labels: list[int] = []
        starts: list[int] = []
        for example in examples:
            tokens = list(example["input_ids"])
            if not all(example.get("attention_mask", ())):
                raise ValueError("attention_mask: examples must not be padded")
            starts += (len(ids) + start for start in _starts(example, len(tokens)))
            ids += tokens
            labels += example.get("labels", tokens)
        if len(labels) != len(ids):
            raise ValueError(f"labels of {len(labels)} tokens for input_ids of {len(ids)}")
        axes = axes_of(self.mesh)
        missing = -len(ids) % self.layout.length_divisor(axes.size, axes.ulysses.size)
        ends = [len(ids), len(ids) + missing] if missing else [len(ids)]
        return shard_batch(
            torch.tensor([ids + [self.pad_token_id] * missing]),
            torch.tensor([labels + [IGNORE] * missing]),
            self.mesh,
            [[*starts, *ends]],
            layout=self.layout,
        )


def _starts(example: dict[str, Any], length: int) -> list[int]:
    """Where the documents of an example begin."""
    lengths, positions = example.get("seq_lengths"), example.get("position_ids")
    if lengths is not None:
        if sum(lengths) != length:
            raise ValueError(f"seq_lengths add up to {sum(lengths)} for {length} tokens")
        return [sum(lengths[:i]) for i in range(len(lengths))]
    if positions is not None:
        return [i for i, position in enumerate(positions) if position == 0]
    return [0]
