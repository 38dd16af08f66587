"""Tests that import Megatron into their own process stay on one worker: importing it takes five CPU seconds."""

import pytest


def pytest_itemcollected(item: pytest.Item) -> None:
    if not any(item.iter_markers("xdist_group")):
        item.add_marker(pytest.mark.xdist_group("megatron"))
