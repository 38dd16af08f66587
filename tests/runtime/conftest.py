"""Cases on gloo ranks, each on ranks of its own."""

from functools import partial

import pytest
from gloo_ranks import run_ranks

HOOKED = ("megatron.core.models.gpt.gpt_model", "megatron.core.ssm.mamba_mixer")
CASES = ("exchange_cases", "loop_cases", "device_cases", *HOOKED)


@pytest.fixture(scope="session")
def run_cases():
    """`run_ranks` for cases of this folder; tests cannot import this file where another conftest.py is loaded too."""
    return partial(run_ranks, imports=CASES)
