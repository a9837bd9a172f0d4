"""The six novels of the bundled corpus at 131,072 tokens, documents masked, memory bounded."""

import resource
from unittest import mock

import pytest

from recipes.data.dataset import build_dataloader
from recipes.data.labels import packing_stats
from recipes.data.tokens import Tokenizer
from recipes.models.llama3 import LLAMA3
from recipes.models.shapes import ModelShape
from tests.helpers.documents import job
from tests.helpers.launch import run_ranks
from tests.helpers.training import trainer_of

SEQ_LEN = 131072


def test_packing_of_the_novels():
    """Ten sequences hold an epoch; every one is full, and the novels lie whole or in long parts."""
    config = job(training__seq_len=SEQ_LEN, training__local_batch_size=1)
    loader = build_dataloader(1, 0, Tokenizer("assets/tokenizer"), config)
    documents = []
    for _, (inputs, labels) in zip(range(10), loader, strict=False):
        stats = packing_stats(inputs["boundaries"], inputs["input"], labels)
        assert stats["padding_share"] == 0
        documents.append(stats["documents"])
    assert max(documents) == 2
    assert sum(documents) <= 18


def train_one_step(folder):
    """Loss, and the peak of this process's memory in MiB."""
    tiny = ModelShape(16, 1, 1, 1, 48, 2048, head_dim=16)
    arguments = [
        *("--job.config_file", "train_configs/debug_cpu.toml", "--job.dump_folder", folder),
        *("--training.seq_len", str(SEQ_LEN), "--training.local_batch_size", "1"),
        *("--training.steps", "1", "--lr_scheduler.warmup_steps", "0", "--rope.extrapolate"),
        *("--comm.init_timeout_seconds", "1000", "--comm.train_timeout_seconds", "1000"),
        *("--metrics.no-enable-tensorboard",),
    ]
    with mock.patch.dict(LLAMA3.flavors, debugmodel=tiny), mock.patch("time.sleep"):
        trainer = trainer_of(arguments)
        seen = {}
        log = trainer.metrics_processor.log

        def keep(step, loss, *args, **kwargs):
            seen[step] = loss
            return log(step, loss, *args, **kwargs)

        trainer.metrics_processor.log = keep
        shard = trainer.sharder.shard

        def with_documents(inputs, labels):
            # The first sequences are one novel each: begin with one that holds two.
            while (inputs["boundaries"] < SEQ_LEN).sum() < 2:
                inputs, labels = next(batches)
            seen["boundaries"] = inputs["boundaries"].tolist()
            return shard(inputs, labels)

        trainer.sharder.shard = with_documents
        batches = iter(trainer.dataloader)
        trainer.train()
        trainer.close()
    return seen, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_step_on_two_novels_in_one_sequence(tmp_path):
    for seen, peak in run_ranks(2, train_one_step, str(tmp_path), timeout=1100):
        ((_, border, *_),) = seen["boundaries"]
        assert 0 < border < SEQ_LEN
        # ln(2048) = 7.6: an untrained model.
        assert 7 < seen[1] < 9
        assert peak < 1500
