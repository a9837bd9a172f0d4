"""What must hold when torchtitan is imported for the first time, whoever does it.

torchtitan 0.2.2 decides on its device while it is imported, and its package imports torch,
inductor and torchao: four seconds, before an argument has been read. So the host is prepared at
that moment and not before, and modules that describe settings are loaded without their package.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType


def prepare() -> None:
    """Let the first import of torchtitan, anywhere, find the host prepared; imports nothing."""
    # torchao 0.16 probes for CUDA libraries and reports each one that a CPU host lacks.
    os.environ.setdefault("TORCHAO_FORCE_SKIP_LOADING_SO_FILES", "1")
    if "torchtitan" in sys.modules:
        raise RuntimeError("import recipes before torchtitan: it fixes torchtitan's device")
    sys.meta_path.insert(0, _Finder())


# Modules that were loaded without their package.
_alone: list[str] = []


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: object = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != "torchtitan" and not any(_package(alone) == name for alone in _alone):
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


class _Loader(importlib.abc.Loader):
    def __init__(self, loader: importlib.abc.Loader) -> None:
        self.loader = loader

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        # As if the package had imported them itself.
        for name in _alone:
            if _package(name) == module.__name__:
                setattr(module, name.rpartition(".")[2], sys.modules[name])
        if module.__name__ != "torchtitan":
            self.loader.exec_module(module)
            return
        from recipes.titan import cpu_host

        with cpu_host.chosen():
            self.loader.exec_module(module)


def _package(name: str) -> str:
    return name.rpartition(".")[0]


def load_alone(name: str) -> ModuleType:
    """A module without its package and without torch.

    It is the one that the package itself finds later. For modules that name torch and use it, if at
    all, when they are called.
    """
    if name in sys.modules:
        return sys.modules[name]
    if _package(name) in sys.modules:
        return importlib.import_module(name)
    root, *parts = name.split(".")
    package = importlib.util.find_spec(root)
    if package is None:
        raise ModuleNotFoundError(f"No module named {root!r}", name=root)
    (folder,) = package.submodule_search_locations  # type: ignore[misc]
    path = Path(folder, *parts).with_suffix(".py")
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    _alone.append(name)
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
    """torch, imported when something of it is asked for.

    Not importlib's LazyLoader, which would leave it in sys.modules: tyro looks whether torch is
    there, and then asks for its types.
    """

    def __getattr__(self, name: str) -> object:
        return getattr(importlib.import_module("torch"), name)
