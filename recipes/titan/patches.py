"""Every patch of torchtitan 0.2.2 and torch 2.13 that a run needs on any host.

Those for hosts without an accelerator are in `cpu_host.py`; README.md beside this file lists all.
"""

import contextlib
import importlib
import io
import json
import os
import re
from collections.abc import Iterator
from contextlib import AbstractContextManager
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint.planner import ReadItem

# A function of this name hides the module.
rendezvous = importlib.import_module("torch.distributed.rendezvous")


def checkpointer(kind: type) -> AbstractContextManager[object]:
    """While torchtitan's Trainer is made: its checkpointer is of this kind."""
    return mock.patch("torchtitan.train.CheckpointManager", kind)


@contextlib.contextmanager
def own_tensorboard_folder(parent: Path) -> Iterator[None]:
    """While torchtitan's logger is made: a folder in `parent` that no other run has.

    torchtitan names it by the minute, and TensorBoard would draw two runs of one minute as one.
    """

    def strftime(_: str) -> str:
        name = start = datetime.now().strftime("%Y%m%d-%H%M%S")
        number = 1
        while (parent / name).exists():
            number += 1
            name = f"{start}-{number}"
        return name

    now = SimpleNamespace(now=lambda: SimpleNamespace(strftime=strftime))
    with mock.patch("torchtitan.components.metrics.datetime", now):
        yield


@contextlib.contextmanager
def own_store() -> Iterator[None]:
    """Within the scope, a process group's store is one that no earlier start has written to.

    torchrun keeps its store when it starts the ranks again, with the addresses of the dead ranks in
    it, and gloo connects to them: "Connection refused". On one node the number of the restart tells
    the starts apart. On several it may differ between nodes; scripts/run_train.sh has torchrun make
    a new store every time.
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


@contextlib.contextmanager
def safetensors_format_named() -> Iterator[None]:
    """While safetensors files are consolidated: their headers say that the tensors are PyTorch's.

    torch's writer leaves out what transformers 4 looks for.
    """

    def dumps(header: Any) -> str:
        return json.dumps({"__metadata__": {"format": "pt"}, **header})

    writer = SimpleNamespace(dumps=dumps, dump=json.dump)
    with mock.patch("torch.distributed.checkpoint._consolidate_hf_safetensors.json", writer):
        yield


def load_without_code() -> None:
    """From now on, whatever in a checkpoint is no tensor is loaded with `weights_only`.

    torch's planner unpickles these entries as they come: the step, the learning rate, the place in
    the data.
    """
    DefaultLoadPlanner.load_bytes = _load_bytes_without_code  # type: ignore[method-assign, assignment]


_load_bytes = DefaultLoadPlanner.load_bytes


def _load_bytes_without_code(
    planner: DefaultLoadPlanner, read_item: ReadItem, value: io.BytesIO
) -> None:
    name = read_item.storage_index.fqn
    try:
        # Empty bytes are pickled as a call of `bytes`.
        with torch.serialization.safe_globals([bytes]):
            torch.load(value, weights_only=True)
    except Exception as error:  # whatever damaged bytes lead to
        code = re.search(r"Unsupported (global|class)", str(error))
        what = "names code to run" if code else "is damaged"
        raise ValueError(f"checkpoint: {name} {what}; not loaded") from None
    value.seek(0)
    _load_bytes(planner, read_item, value)
