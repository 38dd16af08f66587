"""Hooks taken out after every test."""

import pytest

from megatron_balance.adapters import areal


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
