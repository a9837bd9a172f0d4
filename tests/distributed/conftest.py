"""The training on one rank that others are compared with."""

from collections.abc import Callable
from functools import cache

import pytest

from tests.helpers.launch import run_ranks
from tests.helpers.training import Result, train_from_seed

# Settings that name a model; folder with its first weights and gradients, and what one rank saw.
Seeded = Callable[[tuple[str, ...]], tuple[str, Result]]


@pytest.fixture(scope="session")
def seeded(tmp_path_factory: pytest.TempPathFactory) -> Seeded:
    @cache
    def seed(settings: tuple[str, ...]) -> tuple[str, Result]:
        folder = str(tmp_path_factory.mktemp("seed"))
        (result,) = run_ranks(1, train_from_seed, folder, settings)
        return folder, result

    return seed


@pytest.fixture(scope="session")
def seed_folder(seeded: Seeded) -> str:
    return seeded(())[0]


@pytest.fixture(scope="session")
def one_rank(seeded: Seeded) -> Result:
    return seeded(())[1]
