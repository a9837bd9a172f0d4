"""Which private names of other packages the code uses, and what of them it replaces."""

import ast
import importlib
import inspect
import pkgutil
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType

from tests import ROOT

OURS = ("recipes", "striped_cp", "bench")
# Calls that replace an attribute, by the last part of their name.
_REPLACING = ("patch", "object", "setattr")
# Public methods of a named tuple, whose fields own the other names.
_NAMED_TUPLE = ("_asdict", "_replace")


def product_files() -> list[Path]:
    folders = ("recipes", "striped_cp", "scripts")
    return [ROOT / "train.py", *(f for folder in folders for f in (ROOT / folder).rglob("*.py"))]


def is_private(name: str) -> bool:
    """Whether a part of a dotted name is private."""
    return any(
        part.startswith("_") and not part.startswith("__") and part not in _NAMED_TUPLE
        for part in name.split(".")
    )


def is_foreign(name: str) -> bool:
    root = name.partition(".")[0]
    return bool(root) and root not in OURS and root not in sys.stdlib_module_names


class Uses(ast.NodeVisitor):
    """What one file uses.

    Attributes:
        imports: every foreign name that it imports, dotted.
        private: private names: dotted, where the file says whose they are, or the name alone.
        inherited: private names of `self` and `super()`, which may be anybody's.
        replaced: foreign attributes that it replaces, dotted.
        defined: private names that it defines.
    """

    def __init__(self, source: str) -> None:
        self.imports: set[str] = set()
        self.private: set[str] = set()
        self.inherited: set[str] = set()
        self.replaced: set[str] = set()
        self.defined: set[str] = set()
        self._names: dict[str, str] = {}  # what a name of this file stands for
        tree = ast.parse(source)
        for node in ast.walk(tree):
            self._bind(node)
        self.visit(tree)
        self.imports = {name for name in self.imports if is_foreign(name)}
        self.private |= {name for name in self.imports if is_private(name)}
        self.private -= self.defined

    def _bind(self, node: ast.AST) -> None:
        match node:
            case ast.Import():
                for alias in node.names:
                    self.imports.add(alias.name)
                    root = alias.name.partition(".")[0]
                    self._names[alias.asname or root] = alias.name if alias.asname else root
            case ast.ImportFrom(module=str(module), level=0):
                for alias in node.names:
                    self.imports.add(f"{module}.{alias.name}")
                    self._names[alias.asname or alias.name] = f"{module}.{alias.name}"
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Attribute() as value):
                if dotted := self._dotted(value):  # aten = torch.ops.aten
                    self._names[name] = dotted
            case ast.Assign(
                targets=[ast.Name(id=name)],
                value=ast.Call(
                    func=ast.Attribute(attr="import_module"), args=[ast.Constant(value=str(module))]
                ),
            ):
                self.imports.add(module)
                self._names[name] = module
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                self.defined.add(name)
            case ast.Name(id=name, ctx=ast.Store()):
                self.defined.add(name)
            case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name, ctx=ast.Store()):
                self.defined.add(name)

    def _dotted(self, node: ast.expr) -> str:
        """What an expression names, as far as the file's imports tell; else ""."""
        match node:
            case ast.Name(id=name):
                return self._names.get(name, "")
            case ast.Attribute(value=value, attr=attr):
                base = self._dotted(value)
                return f"{base}.{attr}" if base else ""
        return ""

    def visit_Attribute(self, node: ast.Attribute) -> None:
        dotted = self._dotted(node)
        if isinstance(node.ctx, ast.Store) and is_foreign(dotted):
            self.replaced.add(dotted)
        if dotted:
            if is_foreign(dotted) and is_private(dotted):
                self.private.add(dotted)
            return
        if is_private(node.attr):
            (self.inherited if _is_own(node.value) else self.private).add(node.attr)
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        function = node.func.attr if isinstance(node.func, ast.Attribute) else ""
        function = node.func.id if isinstance(node.func, ast.Name) else function
        name = ""
        match node.args:
            case [ast.Constant(value=str(name)), *_]:
                pass
            case [owner, ast.Constant(value=str(attribute)), *_]:
                name = f"{self._dotted(owner)}.{attribute}".lstrip(".")
        if function in _REPLACING and is_foreign(name) and "." in name:
            self.replaced.add(name)
        if function in (*_REPLACING, "getattr", "hasattr") and name and is_private(name):
            self.private.add(name)
        self.generic_visit(node)


def _is_own(node: ast.expr) -> bool:
    match node:
        case ast.Name(id="self" | "cls") | ast.Call(func=ast.Name(id="super")):
            return True
    return False


def overridden() -> Iterator[tuple[str, str, FunctionType]]:
    """(private method of a foreign class, file, ours) for every one that a class here overrides."""
    for package in ("recipes", "striped_cp"):
        for module_info in pkgutil.walk_packages([str(ROOT / package)], f"{package}."):
            module = importlib.import_module(module_info.name)
            for kind in vars(module).values():
                if inspect.isclass(kind) and kind.__module__ == module.__name__:
                    file = module_info.name.replace(".", "/") + ".py"
                    yield from ((name, file, ours) for name, ours in _overrides(kind))


def _overrides(kind: type) -> Iterator[tuple[str, FunctionType]]:
    for name, member in vars(kind).items():
        function = getattr(member, "__func__", member)  # a static or class method's
        if not isinstance(function, FunctionType) or not is_private(name):
            continue
        if function.__module__ != kind.__module__:
            continue  # added by a decorator
        for base in kind.__mro__[1:]:
            if name in vars(base) and is_foreign(base.__module__):
                yield f"{base.__module__}.{base.__qualname__}.{name}", function
                break
