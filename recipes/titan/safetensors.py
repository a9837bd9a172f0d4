"""torch's writer of safetensors files (2.13) leaves out what transformers 4 looks for."""

import contextlib
import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock


@contextlib.contextmanager
def format_named() -> Iterator[None]:
    """While files are consolidated: their headers say that the tensors are PyTorch's."""

    def dumps(header: Any) -> str:
        return json.dumps({"__metadata__": {"format": "pt"}, **header})

    writer = SimpleNamespace(dumps=dumps, dump=json.dump)
    with mock.patch("torch.distributed.checkpoint._consolidate_hf_safetensors.json", writer):
        yield
