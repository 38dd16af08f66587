"""Gloo ranks; hooks taken out after every test."""

import sys
from pathlib import Path

import pytest
from gloo_ranks import run_ranks

from megatron_balance.adapters import areal

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def world():
    """Runs a function of areal_cases.py on four ranks; importing AReaL takes seconds."""

    def run(case, **arguments):
        return run_ranks(4, f"areal_cases:{case}", **arguments)

    return run


@pytest.fixture
def install():
    """`areal.install`, undone after the test."""
    made = []

    def install(**options):
        made.append(areal.install(**options))
        return made[-1]

    yield install
    for installation in made:
        installation.undo()
    assert not areal.is_installed()
