"""Before any test imports torch: tests run on a host without GPUs, also where there are some."""

import os

import pytest

from tests import ROOT


def pytest_configure(config: pytest.Config) -> None:
    """Hide the GPUs, but from `pytest -m gpu`; let `recipes` choose the device for torchtitan.

    Most tests are about gloo ranks, more of them than there are GPUs, and about what a host without
    GPUs is told.
    """
    if config.getoption("markexpr") != "gpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    import torch

    # Tests run in parallel processes, and loopback rings in threads: one core each.
    torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Commands first, then ranks, then one process: no long test is left over for one worker."""
    folders = ("integration", "distributed", "unit")
    items.sort(key=lambda item: folders.index(item.path.relative_to(ROOT / "tests").parts[0]))
