"""What a rank gets of a batch."""

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from recipes.data.batch import BatchSharder
from recipes.preflight import load_config
from striped_cp import Striped


class FakeMesh(DeviceMesh):
    """Size and rank of a cp mesh, which is all that selecting tokens needs."""

    ndim = 1
    mesh_dim_names = ("cp",)

    def __init__(self, size: int, rank: int) -> None:
        self._size, self._rank = size, rank

    def size(self, mesh_dim: int | None = None) -> int:
        return self._size

    def get_local_rank(self, mesh_dim: int | None = None) -> int:
        return self._rank

    def get_group(self, mesh_dim: int | None = None) -> "FakeMesh":
        return self

    group_name = "fake"


class FakeDims:
    pp_enabled = False

    def __init__(self, size: int, rank: int) -> None:
        self.cp_mesh = FakeMesh(size, rank) if size > 1 else None

    def get_optional_mesh(self, name: str) -> FakeMesh | None:
        assert name == "cp"
        return self.cp_mesh


def sharder(size: int, rank: int, *args: str, pp: bool = False) -> BatchSharder:
    dims = FakeDims(size, rank)
    dims.pp_enabled = pp
    return BatchSharder(load_config(list(args)), dims)  # type: ignore[arg-type]


def batch(rows: int = 2, seq_len: int = 16) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    tokens = torch.arange(rows * (seq_len + 1)).view(rows, seq_len + 1)
    return {"input": tokens[:, :-1]}, tokens[:, 1:]


@pytest.mark.parametrize("size", [1, 2, 4])
def test_every_token_keeps_its_target_and_no_rank_shares_one(size: int) -> None:
    inputs, labels = batch()
    pairs = []
    for rank in range(size):
        tokens, targets, _, kwargs = sharder(size, rank).shard(inputs, labels)
        assert tokens.shape == targets.shape == (2, 16 // size)
        assert torch.equal(inputs["input"][:, kwargs["positions"][0]], tokens)
        pairs += zip(tokens.flatten().tolist(), targets.flatten().tolist(), strict=True)
    wanted = zip(inputs["input"].flatten().tolist(), labels.flatten().tolist(), strict=True)
    assert sorted(pairs) == sorted(wanted)


def test_token_stripes() -> None:
    inputs, labels = batch(rows=1, seq_len=8)
    tokens, targets, _, kwargs = sharder(2, 1).shard(inputs, labels)
    assert tokens.tolist() == [[1, 3, 5, 7]]
    assert targets.tolist() == [[2, 4, 6, 8]]
    assert kwargs["positions"].tolist() == [[1, 3, 5, 7]]
    assert kwargs["attention_masks"] is None


def test_layout_follows_the_settings() -> None:
    balancer = "--parallelism.context_parallel_load_balancer"
    inputs, labels = batch(rows=1, seq_len=8)
    for args, expected in (
        ([balancer, "headtail"], [0, 1, 6, 7]),
        ([balancer, "contiguous"], [0, 1, 2, 3]),
        (["--striped_cp.block_size", "2"], [0, 1, 4, 5]),
    ):
        tokens, *_ = sharder(2, 0, *args).shard(inputs, labels)
        assert tokens.tolist() == [expected]


BOUNDARIES = torch.tensor([[0, 3, 8, 8], [0, 8, 8, 8]])


def test_documents_stay_whole_and_positions_restart() -> None:
    inputs, labels = batch(seq_len=8)
    inputs["boundaries"] = BOUNDARIES
    *_, kwargs = sharder(2, 1).shard(inputs, labels)
    assert torch.equal(kwargs["attention_masks"].boundaries, BOUNDARIES)
    assert kwargs["positions"].tolist() == [[1, 0, 2, 4], [1, 3, 5, 7]]
    *_, kwargs = sharder(2, 1, "--documents.no_reset_positions").shard(inputs, labels)
    assert kwargs["positions"].tolist() == [[1, 3, 5, 7]]
    *_, kwargs = sharder(2, 1, "--documents.no_mask").shard(inputs, labels)
    assert kwargs["attention_masks"] is None
    assert kwargs["positions"].tolist() == [[1, 3, 5, 7]]


def test_one_document_a_row_is_plain_causal_attention() -> None:
    inputs, labels = batch(seq_len=8)
    inputs["boundaries"] = BOUNDARIES[1:].expand(2, -1)
    *_, kwargs = sharder(2, 0).shard(inputs, labels)
    assert kwargs["attention_masks"] is None


def test_a_pipeline_gets_positions_for_every_row() -> None:
    *_, kwargs = sharder(2, 0, pp=True).shard(*batch(rows=3, seq_len=8))
    assert kwargs["positions"].tolist() == [[0, 2, 4, 6]] * 3


def test_sharding_is_the_layout() -> None:
    assert sharder(2, 0).layout == Striped(1)


def test_context_counts_what_a_token_sees() -> None:
    inputs, labels = batch(seq_len=8)
    inputs["boundaries"] = BOUNDARIES
    in_document, in_sequence = [[1, 0, 2, 4], [1, 3, 5, 7]], [[1, 3, 5, 7]]
    for args, expected in (
        ([], in_document),
        (["--documents.no_reset_positions"], in_document),
        (["--documents.no_mask"], in_sequence),
    ):
        _, _, context, _ = sharder(2, 1, *args).shard(inputs, labels)
        assert context.tolist() == expected
