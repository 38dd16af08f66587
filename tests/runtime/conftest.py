"""Cases on gloo ranks, each on ranks of its own."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from gloo_ranks import run_ranks

HOOKED = ("megatron.core.models.gpt.gpt_model", "megatron.core.ssm.mamba_mixer")
CASES = ("exchange_cases", "loop_cases", "device_cases", *HOOKED)


@pytest.fixture(scope="session")
def run_cases() -> Any:
    """`run_ranks` for cases of this folder; tests cannot import this file where another conftest.py is loaded too."""
    return partial(run_ranks, imports=CASES)
