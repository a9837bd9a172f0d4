"""Ranks that torchrun started again must not read what the ranks before them left in its store."""

import contextlib
import importlib
import os
from collections.abc import Iterator
from unittest import mock

import torch.distributed as dist

# A function of this name hides the module.
rendezvous = importlib.import_module("torch.distributed.rendezvous")


@contextlib.contextmanager
def own_store() -> Iterator[None]:
    """Within the scope, a process group's store is one that no earlier start has written to.

    torchrun (torch 2.13) keeps its store over restarts, with the addresses of the dead ranks in it,
    and gloo connects to them: "Connection refused". On one node the number of the restart tells the
    starts apart. On several it may differ between nodes; scripts/run_train.sh has torchrun make a
    new store every time.
    """
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    one_node = os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE")
    if restart == "0" or not one_node:
        yield
        return
    create = rendezvous._create_c10d_store

    def create_prefixed(*args: object, **kwargs: object) -> dist.Store:
        return dist.PrefixStore(f"restart_{restart}", create(*args, **kwargs))

    with mock.patch.object(rendezvous, "_create_c10d_store", create_prefixed):
        yield
