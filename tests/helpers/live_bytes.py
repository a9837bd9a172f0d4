"""Memory of what torch operators return, while it lives: what a GPU's allocator would count."""

import time
import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Bytes of the storages that were made under this mode and are still alive.

    What a custom operator allocates for itself is not seen. Host memory that stands for a device's
    offload target is told apart by `leave_out`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = 0
        self.peak = 0
        self._alive: dict[int, weakref.ref] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                self._add(leaf.untyped_storage())
        return out

    def _add(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata not in self._alive and storage.nbytes():
            self._watch(storage, storage.nbytes())

    def _watch(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        key = storage._cdata

        def gone(_: weakref.ref) -> None:
            del self._alive[key]
            self.now -= nbytes

        self._alive[key] = weakref.ref(storage, gone)
        self.now += nbytes
        self.peak = max(self.peak, self.now)

    def settled(self) -> int:
        """`now`, once other threads have let go of what they need no more.

        A thread of gloo frees the tensors of a collective some time after its `wait()` has
        returned, since it has to wait for the interpreter; until then they are counted.
        """
        least = self.now
        for _ in range(20):
            time.sleep(0.01)
            least = min(least, self.now)
        return least

    def leave_out(self, tensor: torch.Tensor) -> torch.Tensor:
        """Count a tensor no longer."""
        storage = tensor.untyped_storage()
        self.now -= storage.nbytes()
        self._watch(storage, 0)
        return tensor
