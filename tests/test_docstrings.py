"""Every example in the planner's docstrings does what it says."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest

import megatron_balance.planner

MODULES = [
    module.name
    for module in pkgutil.walk_packages(megatron_balance.planner.__path__, prefix="megatron_balance.planner.")
    if not module.ispkg
]


@pytest.mark.parametrize("name", MODULES)
def test_examples(name: str) -> None:
    assert doctest.testmod(importlib.import_module(name)).failed == 0


def test_there_are_examples() -> None:
    finder = doctest.DocTestFinder()
    examples = [test for name in MODULES for test in finder.find(importlib.import_module(name)) if test.examples]
    assert len(examples) >= 5
