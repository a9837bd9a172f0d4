"""Striped context parallelism: exact ring attention in which every rank does the same work.

Each name is imported when it is first used: layouts, lengths and documents' plans are integers, and
who asks for those alone does not wait for torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .attention import ring_attention
    from .documents import Documents
    from .layout import Contiguous, HeadTail, Layout, Striped
    from .observer import RingObserver, observe
    from .parallel_style import RingAttention, StripedContextParallel
    from .selection import Selection, select_kernel
    from .shard import shard_sequence, unshard_sequence

__all__ = [
    "Contiguous",
    "Documents",
    "HeadTail",
    "Layout",
    "RingAttention",
    "RingObserver",
    "Selection",
    "Striped",
    "StripedContextParallel",
    "observe",
    "ring_attention",
    "select_kernel",
    "shard_sequence",
    "unshard_sequence",
]

_MODULES = {
    "attention": ["ring_attention"],
    "documents": ["Documents"],
    "layout": ["Contiguous", "HeadTail", "Layout", "Striped"],
    "observer": ["RingObserver", "observe"],
    "parallel_style": ["RingAttention", "StripedContextParallel"],
    "selection": ["Selection", "select_kernel"],
    "shard": ["shard_sequence", "unshard_sequence"],
}


def __getattr__(name: str) -> object:
    for module, names in _MODULES.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
