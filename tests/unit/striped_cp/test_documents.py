"""Documents: construction, checks, positions, pytree."""

import pytest
import torch
from torch.utils._pytree import tree_map

from striped_cp import Documents


def test_rows_are_padded_with_the_sequence_length():
    documents = Documents.from_cu_seqlens([[0, 700, 1024], [0, 1024], [0, 1, 2, 1024]])
    assert documents.boundaries.tolist() == [
        [0, 700, 1024, 1024],
        [0, 1024, 1024, 1024],
        [0, 1, 2, 1024],
    ]
    assert documents.batch_size == 3
    assert documents.seq_len == 1024


@pytest.mark.parametrize(
    "rows",
    [
        [],
        [[0]],
        [[1, 8]],
        [[0, 5, 4, 8]],
        [[0, 8], [0, 9]],
        [[0, 7.9, 8]],
        [0, 8],
        [["0", "8"]],
    ],
)
def test_impossible_boundaries_are_refused(rows):
    with pytest.raises(ValueError, match="got"):
        Documents.from_cu_seqlens(rows)


def test_float_or_one_dimensional_boundaries_are_refused():
    with pytest.raises(ValueError, match="int64 CPU tensor"):
        Documents(torch.tensor([[0.0, 8.0]]))
    with pytest.raises(ValueError, match="int64 CPU tensor"):
        Documents(torch.tensor([0, 8]))


def test_positions_restart_in_every_document():
    documents = Documents.from_cu_seqlens([[0, 3, 8], [0, 0, 6, 8]])
    positions = torch.tensor([0, 2, 3, 5, 7])
    assert documents.positions_in_document(positions).tolist() == [[0, 2, 0, 2, 4], [0, 2, 3, 5, 1]]


def test_pytree_splits_the_batch_as_pipeline_parallelism_does():
    documents = Documents.from_cu_seqlens([[0, 3, 8], [0, 8]])
    second = tree_map(lambda x: x[1:], documents)
    assert isinstance(second, Documents)
    assert second.boundaries.tolist() == [[0, 8, 8]]


def test_a_tensor_of_cumulative_lengths_will_do():
    assert Documents.from_cu_seqlens(torch.tensor([[0, 3, 8]])).boundaries.tolist() == [[0, 3, 8]]


def test_documents_own_their_boundaries():
    boundaries = torch.tensor([[0, 3, 8]])
    documents = Documents(boundaries)
    boundaries[0, 1] = 5
    assert documents.boundaries.tolist() == [[0, 3, 8]]


def test_the_message_about_many_documents_is_short():
    cuts = [[0, *range(1, 100_000), 5]]
    with pytest.raises(ValueError, match="in row 0") as error:
        Documents.from_cu_seqlens(cuts)
    assert len(str(error.value)) < 300
