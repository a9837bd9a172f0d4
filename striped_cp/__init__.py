"""Striped context parallelism: exact ring attention in which every rank does the same work."""

from .attention import ring_attention
from .documents import Documents
from .layout import Contiguous, HeadTail, Layout, Striped
from .observe import RingObserver, observe
from .parallel_style import RingAttention, StripedContextParallel
from .shard import shard_sequence, unshard_sequence

__all__ = [
    "Contiguous",
    "Documents",
    "HeadTail",
    "Layout",
    "RingAttention",
    "RingObserver",
    "Striped",
    "StripedContextParallel",
    "observe",
    "ring_attention",
    "shard_sequence",
    "unshard_sequence",
]
