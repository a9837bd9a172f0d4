"""Packed documents on several ranks: nothing leaks, nothing is counted twice, all read the same."""

import numpy as np
import pytest
import torch
import torch.distributed as dist

from recipes.data.batch import BatchSharder
from recipes.data.dataset import build_dataloader
from recipes.data.labels import IGNORE, build_sample, collate
from recipes.data.packing import Packed, Piece
from recipes.data.targets import are_targets, token_ids, with_targets
from striped_cp import unshard_sequence
from tests.helpers.documents import NumberTokenizer, fingerprint, job, number_documents, write_jsonl
from tests.helpers.launch import run_ranks
from tests.helpers.model_step import Step, make_dims

SEQ_LEN = 64
# Five documents a row, odd lengths, the two rows cut differently; row 1 has padding.
LENGTHS = [[7, 13, 13, 17, 14], [3, 21, 7, 18, 9]]
LOGITS = ("--memory.loss_chunk_tokens", "0", "--training.mixed_precision_param", "float32")


def documents():
    generator = torch.Generator().manual_seed(5)
    return [
        [torch.randint(3, 2000, (n,), generator=generator).numpy().astype("int32") for n in row]
        for row in LENGTHS
    ]


def packed_batch(rows):
    pieces = [Packed([Piece(tokens, None) for tokens in row], None) for row in rows]
    return collate([build_sample(packed, SEQ_LEN, mask=True) for packed in pieces])


def make_step(degree):
    return Step("--parallelism.context_parallel_degree", str(degree), *LOGITS)


@torch.no_grad()
def logits(step, batch):
    """Logits (B, S, V) of the whole sequences, on every rank."""
    sharder = BatchSharder(step.config, step.dims)
    tokens, *_, kwargs = sharder.shard(*batch)
    local = step.parts[0](tokens, **kwargs)
    if sharder.cp_mesh is None:
        return local
    return unshard_sequence(local, mesh=sharder.cp_mesh, layout=sharder.layout)


def changed_positions(degree):
    """For every row and document: where logits change when its first token does."""
    step = make_step(degree)
    before = logits(step, packed_batch(documents()))
    found = []
    for row in range(2):
        for number in range(5):
            other = documents()
            other[row][number][0] += 1
            after = logits(step, packed_batch(other))
            changed = (after != before).any(dim=-1)
            found.append([changed[r].nonzero().flatten().tolist() for r in range(2)])
    return found


@pytest.mark.parametrize("degree", [1, 2, 4])
def test_a_token_changes_its_own_document_and_no_other(degree):
    expected = []
    for row in range(2):
        ends = np.cumsum(LENGTHS[row])
        for end, length in zip(ends, LENGTHS[row], strict=True):
            touched: list[list[int]] = [[], []]
            touched[row] = list(range(end - length, end))
            expected.append(touched)
    for found in run_ranks(degree, changed_positions, degree):
        assert found == expected


def with_turns(rows):
    """The documents, of which only some tokens are learned; of one none at all."""
    dice = np.random.default_rng(3)
    rows = [
        [with_targets(tokens, dice.random(len(tokens)) < 0.4) for tokens in row] for row in rows
    ]
    rows[0][1] = with_targets(token_ids(rows[0][1]), np.zeros(len(rows[0][1]), bool))
    return rows


def losses(degree):
    """(loss of the packed batch, loss of its documents each alone), summed over their targets.

    Of documents, and of such of which only some tokens are learned.
    """
    step = make_step(degree)
    found = []
    for rows in (documents(), with_turns(documents())):
        inputs, labels = packed_batch(rows)
        packed = step.loss_fn(logits(step, (inputs, labels)), labels).item()
        alone = 0.0
        for tokens in (t for row in rows for t in row) if degree == 1 else ():
            ids = torch.from_numpy(token_ids(tokens)).long()[None]
            targets = ids.masked_fill(torch.from_numpy(~are_targets(tokens)), IGNORE)
            with torch.no_grad():
                alone += step.loss_fn(step.parts[0](ids[:, :-1]), targets[:, 1:]).item()
        found.append((packed, alone))
    return found


def test_the_loss_of_a_packed_batch_is_that_of_its_documents_alone():
    alone = [loss for _, loss in run_ranks(1, losses, 1)[0]]
    assert 0 < alone[1] < 0.6 * alone[0]
    for degree in (1, 2, 4):
        for found in run_ranks(degree, losses, degree):
            assert [packed for packed, _ in found] == pytest.approx(alone, rel=1e-5)


def read(folder, data_shard, context, workers):
    """What a rank reads in three steps, and how many targets all ranks count in each."""
    dims = make_dims(dp_shard=data_shard, cp=context)
    config = job(
        training__dataset="local",
        training__dataset_path=folder,
        training__seq_len=32,
        training__local_batch_size=2,
        training__dataloader__num_workers=workers,
        parallelism__context_parallel_degree=context,
        parallelism__data_parallel_shard_degree=data_shard,
    )
    mesh = dims.get_optional_mesh("batch")
    rank = 0 if mesh is None else mesh.get_local_rank()
    batches = iter(build_dataloader(data_shard, rank, NumberTokenizer(), config))
    sharder = BatchSharder(config, dims)
    found = []
    for _ in range(3):
        inputs, labels = next(batches)
        _, local, *_ = sharder.shard(inputs, labels)
        counts = torch.tensor([(local != IGNORE).sum(), (labels != IGNORE).sum()])
        dist.all_reduce(counts)
        # Every context-parallel rank counted the whole batch in the second number.
        assert counts[0] == counts[1] / context
        found.append((fingerprint((inputs, labels)), int(counts[0])))
    return rank, found


@pytest.mark.parametrize("workers", [0, 2])
def test_context_parallel_ranks_read_the_same_and_data_parallel_ranks_do_not(tmp_path, workers):
    write_jsonl(tmp_path / "a.jsonl", number_documents([30, 5, 12, 90, 7, 7, 41, 16, 3, 25, 64]))
    ranks = run_ranks(4, read, str(tmp_path), 2, 2, workers)
    assert [rank for rank, _ in ranks] == [0, 0, 1, 1]
    assert ranks[0] == ranks[1]
    assert ranks[2] == ranks[3]
    hashes = [{fingerprint for fingerprint, _ in found} for _, found in ranks]
    assert not hashes[0] & hashes[2]
    # Neither the context-parallel degree nor the workers change what is read.
    alone = run_ranks(2, read, str(tmp_path), 2, 1, 0)
    assert [alone[0], alone[1]] == [ranks[0], ranks[2]]
