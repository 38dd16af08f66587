"""Worlds of gloo ranks; hooks taken out after every test."""

import sys
from pathlib import Path

import pytest

from megatron_balance.adapters.areal import hooks

sys.path.insert(0, str(Path(__file__).parent))
from areal_world import HAS_AREAL, World

HOOKED = (
    "areal.infra.controller.train_controller",
    "areal.experimental.training_service.data_proxy.dispatcher",
    "areal.trainer.rl_trainer",
)
"""Modules that `install` imports."""


@pytest.fixture(scope="session")
def world2():
    world = World(2)
    yield world
    world.stop()


@pytest.fixture(scope="session")
def world4():
    # The one that runs AReaL's own code, where it is installed.
    world = World(4, modules=HOOKED if HAS_AREAL else ("torch",))
    yield world
    world.stop()


@pytest.fixture
def undone():
    """Whatever a test installs in this process is taken out after it."""
    yield
    hooks.installation.undo()
    assert not hooks.is_installed()
