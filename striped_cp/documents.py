"""Documents packed into a sequence: where each begins and ends, per batch row."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.utils._pytree import register_pytree_node


@dataclass(frozen=True, eq=False)
class Documents:
    """Global document boundaries of a batch; a token attends only within its own document.

    Attributes:
        boundaries: int64 CPU tensor (B, N). Row b is 0 = c_0 <= c_1 <= ... <= c_{N-1} = S; document
            i of the row is [c_i, c_{i+1}). Rows with fewer documents repeat S (empty documents).

    Documents with equal boundaries are equal, so that what is planned for them can be looked up.

    It is no tensor, so that FSDP and trainers leave it on the host, where the ring plans its kernel
    calls without synchronising; it is a pytree node, so that pipeline parallelism splits it over
    the batch like any other input.

    Raises:
        ValueError: `boundaries` is not of this form.
    """

    boundaries: torch.Tensor

    def __post_init__(self) -> None:
        b = self.boundaries
        if (
            not isinstance(b, torch.Tensor)
            or (b.dim(), b.dtype, b.device.type) != (2, torch.int64, "cpu")
            or b.shape[0] < 1
            or b.shape[1] < 2
        ):
            got = (
                f"{b.dtype} of shape {tuple(b.shape)} on {b.device}"
                if isinstance(b, torch.Tensor)
                else type(b).__name__
            )
            raise ValueError(
                "document boundaries must be an int64 CPU tensor of shape (B, N), B >= 1 and "
                f"N >= 2; got {got}"
            )
        wrong = (b[:, 0] != 0) | (b.diff(dim=1) < 0).any(dim=1) | (b[:, -1] != b[0, -1])
        if wrong.any():
            row = int(wrong.nonzero()[0])
            head = ", ".join(map(str, b[row, :8].tolist()))
            raise ValueError(
                "document boundaries of a row must start at 0, not decrease, and end at the "
                f"sequence length, the same for every row; got [{head}"
                f"{', ...' if b.shape[1] > 8 else ''}], ending at {int(b[row, -1])}, in row {row}"
            )
        # A copy: plans are cached by value, and backward must see what forward saw.
        object.__setattr__(self, "boundaries", b.clone())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Documents) and self._value() == other._value()

    def __hash__(self) -> int:
        return hash(self._value())

    def _value(self) -> tuple[torch.Size, bytes]:
        return self.boundaries.shape, self.boundaries.numpy().tobytes()

    @classmethod
    def checked_before(cls, boundaries: torch.Tensor) -> Documents:
        """From the boundaries, or a slice of the batch of them, of documents that were checked."""
        documents = object.__new__(cls)
        object.__setattr__(documents, "boundaries", boundaries)
        return documents

    @classmethod
    def from_cu_seqlens(cls, cu_seqlens: Sequence[Sequence[int]]) -> Documents:
        """Build from one list of cumulative lengths per batch row: [[0, 700, 1024], [0, 1024]]."""
        try:
            rows = [[operator.index(x) for x in row] for row in cu_seqlens]
        except TypeError:
            raise ValueError(
                "cu_seqlens needs one list of integers [0, ..., S] per batch row; "
                f"got {cu_seqlens!r:.200}"
            ) from None
        if not rows or any(len(row) < 2 for row in rows):
            raise ValueError(
                "cu_seqlens needs one list [0, ..., S] of at least two entries per batch row; "
                f"got {rows!r:.200}"
            )
        width = max(len(row) for row in rows)
        padded = [[*row, *[row[-1]] * (width - len(row))] for row in rows]
        return cls(torch.tensor(padded, dtype=torch.int64))

    @property
    def batch_size(self) -> int:
        return self.boundaries.shape[0]

    @property
    def seq_len(self) -> int:
        return int(self.boundaries[0, -1])

    def positions_in_document(self, positions: torch.Tensor) -> torch.Tensor:
        """Distance of each global position (n,) from the start of its document: int64 (B, n)."""
        expanded = positions.cpu().expand(self.batch_size, -1).contiguous()
        last_start = torch.searchsorted(self.boundaries, expanded, right=True) - 1
        return expanded - self.boundaries.gather(1, last_start)


register_pytree_node(
    Documents,
    lambda documents: ([documents.boundaries], None),
    # The leaf may be a slice of the batch, or a fake tensor.
    lambda leaves, _context: Documents.checked_before(*leaves),
    serialized_type_name="striped_cp.Documents",
)
