"""The training on one rank that others are compared with."""

import pytest

from tests.helpers.launch import run_ranks
from tests.helpers.training import Result, train_from_seed


@pytest.fixture(scope="session")
def seed_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("seed"))


@pytest.fixture(scope="session")
def one_rank(seed_folder: str) -> Result:
    (result,) = run_ranks(1, train_from_seed, seed_folder)
    return result
