"""What must hold when torchtitan is imported for the first time, whoever does it.

torchtitan 0.2.2 decides on its device while it is imported, and its package imports torch,
inductor and torchao: four seconds, before an argument has been read. So the host is prepared at
that moment and not before, and the modules that only describe settings are loaded without it.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType


def prepare() -> None:
    """Let the first import of torchtitan, anywhere, find the host prepared; imports nothing."""
    # torchao 0.16 probes for CUDA libraries and reports each one that a CPU host lacks.
    os.environ.setdefault("TORCHAO_FORCE_SKIP_LOADING_SO_FILES", "1")
    if "torchtitan" in sys.modules:
        raise RuntimeError("import recipes before torchtitan: it fixes torchtitan's device")
    sys.meta_path.insert(0, _Finder())


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(
        self, name: str, path: object = None, target: object = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != "torchtitan":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


class _Loader(importlib.abc.Loader):
    def __init__(self, loader: importlib.abc.Loader) -> None:
        self.loader = loader

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        from recipes.titan import cpu_host

        with cpu_host.chosen():
            self.loader.exec_module(module)


def load_alone(name: str) -> ModuleType:
    """A module of torchtitan's, without its package and without torch.

    It is the one that torchtitan itself finds later. For modules that name torch and use it, if at
    all, when they are called.
    """
    if name in sys.modules:
        return sys.modules[name]
    package = importlib.util.find_spec("torchtitan")
    (folder,) = package.submodule_search_locations  # type: ignore[union-attr, misc]
    path = Path(folder, *name.split(".")[1:]).with_suffix(".py")
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    if "torch" in sys.modules:
        spec.loader.exec_module(module)
        return module
    sys.modules["torch"] = _Torch("torch")
    try:
        spec.loader.exec_module(module)
    finally:
        del sys.modules["torch"]
    return module


class _Torch(ModuleType):
    """torch, imported when something of it is asked for."""

    def __getattr__(self, name: str) -> object:
        return getattr(importlib.import_module("torch"), name)
