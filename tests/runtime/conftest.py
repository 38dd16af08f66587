"""Worlds of gloo ranks that live as long as the tests of a process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from gloo_ranks import World, preload

CASES = ("exchange_cases", "loop_cases", "device_cases")


def _world(num_ranks: int) -> Iterator[World]:
    preload(["megatron_balance.mcore.loop", *CASES])
    world = World(num_ranks, *CASES)
    yield world
    world.stop()


@pytest.fixture(scope="session")
def world1() -> Iterator[World]:
    yield from _world(1)


@pytest.fixture(scope="session")
def world2() -> Iterator[World]:
    yield from _world(2)


@pytest.fixture(scope="session")
def world4() -> Iterator[World]:
    yield from _world(4)
