"""A pytest plugin: TorchSpec's own tests with the adapter on. `pytest -p torchspec_plugin` from a checkout.

The tests import the controller anew, with Ray's decorator switched off, whenever they make one. Each of these classes
is hooked as soon as its module has run, by an import hook.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import queue
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import pytest

from megatron_balance.adapters import torchspec
from megatron_balance.adapters.torchspec import CONTROLLER


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("balance")
    group.addoption("--balance-approach", default="A", help="A, B or C")
    group.addoption("--balance-window", type=int, default=2, help="dispatches' worth of samples to choose among")
    group.addoption("--balance-cost", default="padded", help="padded or tokens")


def pytest_configure(config: pytest.Config) -> None:
    import ray.util.queue

    ray.util.queue.Queue = queue.Queue  # of this process: Ray's take minutes and are not what is tested
    settings = {name: config.getoption(f"--balance-{name}") for name in ("approach", "window", "cost")}
    sys.meta_path.insert(0, HookedController(settings))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    hooked = next(finder.num_hooked for finder in sys.meta_path if isinstance(finder, HookedController))
    terminalreporter.write_line(f"megatron_balance: hooked the controller's class {hooked} times")


class HookedController(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds and runs the controller's module as ever, then hooks its class."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.num_hooked = 0
        self._settings = settings
        self._loader: Any = None

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        spec = importlib.machinery.PathFinder.find_spec(fullname, path) if fullname == CONTROLLER else None
        if spec is not None:
            self._loader, spec.loader = spec.loader, self
        return spec

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        torchspec.installation.undo()
        torchspec.install(**self._settings)
        self.num_hooked += 1
