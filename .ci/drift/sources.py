"""The Python sources of a package, parsed but never imported: from a wheel, or from a checkout's folder.

with open_sources(Path("megatron_core-0.19.2-….whl")) as sources:
    sources.find("megatron.training.training:train_step")
"""

from __future__ import annotations

import ast
import contextlib
import functools
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


class Bound(NamedTuple):
    """The origin of a name that a module binds: a module, and the name there."""

    module: str
    name: str


class Sources:
    """Modules of one version of a package: all Python files, from where imports begin, and the text of one of them."""

    def __init__(self, files: frozenset[str], read: Callable[[str], str]) -> None:
        self.files = files
        self.read = read

    def path(self, module: str) -> str | None:
        """The file of a module, or None where there is none."""
        stem = module.replace(".", "/")
        return next((path for path in (f"{stem}.py", f"{stem}/__init__.py") if path in self.files), None)

    @functools.cache  # noqa: B019 - a process looks at few versions, each for as long as it runs
    def tree(self, module: str) -> ast.Module | None:
        """The parsed module, or None where there is none."""
        path = self.path(module)
        return None if path is None else ast.parse(self.read(path), filename=path)

    def find(self, target: str) -> Definition | None:
        """The definition of `module:function`, `module:Class` or `module:Class.method`."""
        module, _, qualified_name = target.partition(":")
        scope: ast.AST | None = self.tree(module)
        for name in qualified_name.split("."):
            scope = None if scope is None else _defined(scope).get(name)
        assert scope is None or isinstance(scope, Definition)
        return scope

    def origin(self, owner: str, name: str) -> Bound | None:
        """The origin of the object that `module` or `module:Class` binds by this name, or None.

        Imports are followed from module to module, as far as they stay within the package.
        """
        module, _, class_name = owner.partition(":")
        if class_name:
            definition = self.find(owner)
            bound = definition is not None and name in _defined(definition)
            return Bound(module, f"{class_name}.{name}") if bound else None
        visited: set[Bound] = set()
        binding: Bound | None = Bound(module, name)
        while binding is not None and binding not in visited and (tree := self.tree(binding.module)) is not None:
            if binding.name in _defined(tree):
                return binding
            visited.add(binding)
            binding = self._imports(binding.module).get(binding.name)
        return None

    def binders(self, target: str) -> list[str]:
        """Modules of its package that bind a function by value, where it is not defined."""
        module, _, name = target.partition(":")
        if "." in name:
            return []
        home = Bound(module, name)
        package = f"{module.partition('.')[0]}/"  # a checkout has tests and examples beside it
        paths = (path for path in sorted(self.files) if path.startswith(package) and name in self.read(path))
        others = (other for other in map(_module_name, paths) if other != module and name in self._imports(other))
        return [other for other in others if self.origin(other, name) == home]

    @functools.cache  # noqa: B019
    def _imports(self, module: str) -> dict[str, Bound]:
        """Names that a module's top level imports from modules."""
        tree = self.tree(module)
        is_package = (self.path(module) or "").endswith("/__init__.py")
        result: dict[str, Bound] = {}
        for node in () if tree is None else _statements(tree):
            if not isinstance(node, ast.ImportFrom):
                continue
            parts = module.split(".")
            base = parts[: len(parts) - node.level + is_package] if node.level else []
            source = ".".join([*base, *([node.module] if node.module else [])])
            result |= {alias.asname or alias.name: Bound(source, alias.name) for alias in node.names}
        return result


@contextlib.contextmanager
def open_sources(place: Path) -> Iterator[Sources]:
    """The sources in a wheel, or in a folder from which the package can be imported."""
    if place.is_dir():
        paths = {path.relative_to(place).as_posix(): path for path in place.rglob("*.py")}
        yield Sources(frozenset(paths), functools.cache(lambda path: paths[path].read_text("utf-8")))
        return
    with zipfile.ZipFile(place) as wheel:
        files = frozenset(name for name in wheel.namelist() if name.endswith(".py"))
        yield Sources(files, functools.cache(lambda path: wheel.read(path).decode("utf-8")))


def _module_name(path: str) -> str:
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def _defined(scope: ast.AST) -> dict[str, Definition]:
    return {node.name: node for node in _statements(scope) if isinstance(node, Definition)}


def _statements(scope: ast.AST) -> Iterator[ast.stmt]:
    """Statements of a module or class, those within `if` and `try` among them, the bodies of functions not."""
    for node in ast.iter_child_nodes(scope):
        if isinstance(node, ast.If | ast.Try | ast.ExceptHandler | ast.With):
            yield from _statements(node)
        elif isinstance(node, ast.stmt):
            yield node
