"""Worlds of one, two and four gloo ranks; each case has ranks of its own."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from gloo_ranks import run_ranks

HOOKED = ("megatron.core.models.gpt.gpt_model", "megatron.core.ssm.mamba_mixer")
CASES = ("exchange_cases", "loop_cases", "device_cases", *HOOKED)


@pytest.fixture(scope="session")
def run_cases() -> Any:
    """`run_ranks` for cases of this folder; tests cannot import this file where another conftest.py is loaded too."""
    return partial(run_ranks, imports=CASES)


def _world(num_ranks: int) -> Any:
    world = SimpleNamespace(run=partial(run_ranks, num_ranks, imports=CASES))
    return pytest.fixture(lambda: world, name=f"world{num_ranks}")


world1, world2, world4 = map(_world, (1, 2, 4))
