"""Stands in for a package that an upstream imports and this machine lacks: it has every module, and every name."""

from __future__ import annotations

import importlib.util
import sys
import types
from importlib.machinery import ModuleSpec
from typing import Any


class _Anything(types.ModuleType):
    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        setattr(self, name, type(name, (), {}))
        return getattr(self, name)


def stand_in_for(package: str) -> None:
    """Make `import PACKAGE` and its submodules work, unless the real one is installed."""

    def find_spec(name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(name, finder, is_package=True) if name.partition(".")[0] == package else None

    finder: Any = types.SimpleNamespace(find_spec=find_spec)
    finder.create_module, finder.exec_module = lambda spec: _Anything(spec.name), lambda module: None
    if importlib.util.find_spec(package) is None:
        sys.meta_path.append(finder)
