"""The host that tests run on."""

import os

from recipes.titan.cpu_host import is_cpu_host


def test_no_gpu_is_seen() -> None:
    """Neither here nor by the processes that tests start."""
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ""
    assert is_cpu_host()
