"""Hooks taken out after every test."""

import pytest

from megatron_balance.adapters import areal


@pytest.fixture
def install():
    """`areal.install`, undone after the test."""
    installations = []

    def install(**options):
        installations.append(areal.install(**options))
        return installations[-1]

    yield install
    for installation in installations:
        installation.undo()
    assert not areal.is_installed()
