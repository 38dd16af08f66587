"""Ranks over gloo for a case, and the double of recsys-examples in the path."""

import sys
from pathlib import Path

import pytest
from gloo_ranks import run_ranks

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE / "upstream_double"), str(HERE)]


@pytest.fixture(scope="session")
def ranks():
    def run(num_ranks, case, **arguments):
        return run_ranks(num_ranks, f"recsys_cases:{case}", **arguments)

    return run
