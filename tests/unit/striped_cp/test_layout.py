"""Layouts: positions, counts, divisors."""

import numpy as np
import pytest
import torch

from striped_cp import Contiguous, HeadTail, Striped
from striped_cp.layout import layout_from_spec
from tests.helpers.own_layout import Snake

LAYOUTS = [Striped(), Striped(2), Striped(64), HeadTail(), Contiguous(), Snake(), Snake(3)]


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        (Striped(), [[0, 3, 6, 9], [1, 4, 7, 10], [2, 5, 8, 11]]),
        (Striped(2), [[0, 1, 6, 7], [2, 3, 8, 9], [4, 5, 10, 11]]),
        (HeadTail(), [[0, 1, 10, 11], [2, 3, 8, 9], [4, 5, 6, 7]]),
        (Contiguous(), [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]),
    ],
)
def test_positions_of_twelve_tokens_on_three_ranks(layout, expected):
    for rank, positions in enumerate(expected):
        got = layout.positions(12, 3, rank)
        assert got.dtype == torch.int64
        assert got.tolist() == positions


def test_headtail_of_an_odd_number_of_tokens_per_rank():
    assert HeadTail().positions(9, 3, 0).tolist() == [0, 1, 8]
    assert HeadTail().positions(9, 3, 1).tolist() == [2, 3, 7]
    assert HeadTail().positions(9, 3, 2).tolist() == [4, 5, 6]


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda x: x.spec)
@pytest.mark.parametrize("world_size", [1, 2, 3, 5, 8])
def test_every_position_once_in_order_and_counted(layout, world_size):
    seq_len = layout.divisor(world_size) * 3
    by_rank = [layout.positions(seq_len, world_size, rank).numpy() for rank in range(world_size)]
    assert sorted(np.concatenate(by_rank)) == list(range(seq_len))
    everywhere = np.arange(seq_len + 1)
    for rank, positions in enumerate(by_rank):
        assert (np.diff(positions) > 0).all()
        expected = (positions < everywhere[:, None]).sum(1)
        counted = layout.count_before(everywhere, seq_len, world_size, rank)
        assert (counted == expected).all()


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda x: x.spec)
def test_spec_round_trip(layout):
    assert layout_from_spec(layout.spec) == layout


@pytest.mark.parametrize(
    "spec", ["zigzag", "", "striped:", "striped:-1", "striped:x", "striped:1:1", "headtail:2"]
)
def test_impossible_specs(spec):
    assert layout_from_spec("striped") == Striped(1)
    with pytest.raises(ValueError, match=r"allowed are striped\[:BLOCK_SIZE\], headtail"):
        layout_from_spec(spec)


def test_million_tokens_stay_integers():
    positions = Striped().positions(2**20, 8, 7)
    assert positions[-1].item() == 2**20 - 1
    assert positions.shape == (2**17,)


def test_length_that_does_not_divide_names_the_nearest():
    message = r"66 must be a positive multiple of 4 .*4 ranks; nearest: 64 or 68"
    with pytest.raises(ValueError, match=message):
        Striped().positions(66, 4, 0)
    with pytest.raises(ValueError, match=r"multiple of 256 .*nearest: 256 or 512"):
        Striped(64).positions(400, 4, 0)
    with pytest.raises(ValueError, match=r"2 must be a positive multiple of 3 .*nearest: 3$"):
        Contiguous().positions(2, 3, 0)


def test_odd_shard_needs_no_factor_of_two():
    assert Striped().divisor(3) == HeadTail().divisor(3) == Contiguous().divisor(3) == 3
    assert Striped(64).divisor(3) == 192


@pytest.mark.parametrize("block_size", [0, -1, 2.0, True, "2"])
def test_block_size_must_be_a_positive_integer(block_size):
    with pytest.raises(ValueError, match="block_size = "):
        Striped(block_size)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda x: x.spec)
@pytest.mark.parametrize("rank", [-1, 2, 3])
def test_a_rank_outside_the_ring_has_no_positions(layout, rank):
    with pytest.raises(ValueError, match=r"is not in a ring of 2: 0 to 1"):
        layout.positions(layout.divisor(2), 2, rank)
