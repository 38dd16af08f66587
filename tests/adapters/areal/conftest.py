"""A world of gloo ranks; hooks taken out after every test."""

import sys
from pathlib import Path

import pytest

from megatron_balance.adapters import areal

sys.path.insert(0, str(Path(__file__).parent))
from areal_world import World


@pytest.fixture(scope="session")
def world():
    world = World(4, modules=("areal_cases",))
    yield world
    world.stop()


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
