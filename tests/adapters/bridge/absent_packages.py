"""Stands in for packages that need CUDA and that Megatron-Bridge's training loop imports.

The modules of `transformer_engine`, `megatron.energon` and `nvidia_resiliency_ext` have every name, all of them empty
classes. Importing this module puts them in place, once Megatron Core has found no Transformer Engine; import
Megatron-Bridge after it.
"""

import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

import megatron.training.training  # noqa: F401 - looks for Transformer Engine

ABSENT = ("transformer_engine", "megatron.energon", "nvidia_resiliency_ext")


def _empty(owner, name):
    """An empty class for every attribute that is asked for, as annotations and base classes do."""
    if name.startswith("__"):
        raise AttributeError(name)
    return _Empty(name, (), {})


class _Empty(type):
    __getattr__ = _empty

    def __or__(cls, other):
        return cls

    __ror__ = __or__


class _Module(ModuleType):
    __getattr__ = _empty


class _Finder(MetaPathFinder, Loader):
    def find_spec(self, fullname, path=None, target=None):
        if any(fullname == package or fullname.startswith(f"{package}.") for package in ABSENT):
            return ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec):
        return _Module(spec.name)

    def exec_module(self, module):
        pass


sys.meta_path.append(_Finder())
