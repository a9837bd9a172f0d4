"""Runs that several tests look at."""

import random
from pathlib import Path

import pytest

from tests.helpers.runs import TINY, Run, torchrun, train

STEPS = 10


@pytest.fixture(scope="session")
def documents(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Short documents of odd lengths: several of them in a sequence, and parts of longer ones."""
    words = ("it", "is", "a", "truth", "universally", "acknowledged", "that", "a", "man", "wants")
    dice = random.Random(0)
    folder = tmp_path_factory.mktemp("documents")
    for i in range(60):
        text = " ".join(dice.choices(words, k=dice.randint(5, 120)))
        (folder / f"{i:02}.txt").write_text(text)
    return folder


@pytest.fixture(scope="session")
def common(documents: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """Settings that make runs comparable: the data and one seed checkpoint."""
    data = ("--training.dataset", "local", "--training.dataset_path", str(documents))
    folder = tmp_path_factory.mktemp("seed")
    seeding = torchrun(
        1,
        *TINY,
        *data,
        *("--checkpoint.enable", "--checkpoint.create_seed_checkpoint"),
        *("--parallelism.context_parallel_degree", "1", "--job.dump_folder", str(folder)),
    )
    assert seeding.status == 0, seeding.output
    return (
        *TINY,
        *data,
        *("--checkpoint.enable", "--checkpoint.initial_load_path", f"{folder}/checkpoint/step-0"),
        *("--checkpoint.interval", "1000", "--training.steps", str(STEPS)),
    )


@pytest.fixture(scope="session")
def by_degree(
    common: tuple[str, ...], documents: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[int, Run]:
    """The same training, with validation, at context-parallel degrees 1, 2 and 4."""
    validation = (
        *("--validation.enable", "--validation.dataset", "local"),
        *("--validation.dataset_path", str(documents)),
        *("--validation.freq", "5", "--validation.steps", "2"),
    )
    return {
        degree: train(
            degree,
            tmp_path_factory.mktemp(f"cp{degree}"),
            *common,
            *validation,
            *("--parallelism.context_parallel_degree", str(degree)),
        )
        for degree in (1, 2, 4)
    }
