"""Settings of all tests: examples repeat and are not timed; what needs other packages runs where they are.

Adapters with a requirements.txt are tested in environments of their own (scripts/check adapters). This file is not in
tests/adapters: pytest would put that folder on the path, and its folders bear the names of packages.
"""

import os
import re
import sys
from pathlib import Path

import pytest
from hypothesis import Phase, settings

ADAPTERS = Path(__file__).parent / "adapters"
collect_ignore = [
    str(requirements.parent)
    for requirements in ADAPTERS.glob("*/requirements.txt")
    if not sys.prefix.endswith(f"-{requirements.parent.name}")
]

# The same examples in every run; `make test-all` explores others. Machines are shared: no example has a deadline.
settings.register_profile("repeatable", deadline=None, derandomize=True)
settings.register_profile("exploring", deadline=None)
# For .ci/mutants.py, which asks whether a test fails, not for the smallest example.
settings.register_profile("first", deadline=None, derandomize=True, phases=[Phase.explicit, Phase.generate])
settings.load_profile("exploring" if os.environ.get("MEGATRON_BALANCE_EXPLORE") else "repeatable")


TOGETHER = re.compile(
    r"tests/training/.*\[((?:(?:DP|TP|PP|VPP|CP|EP)\d-?)+)|(tests/(?:megatron|runtime)/|tests/(?!training/test_fail)[^:]+)"
)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """A worker gets whole files, folders whose tests share imports or servers, and all of a layout's stock run."""
    from xdist.scheduler import LoadScopeScheduling

    class ByPlace(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            group = TOGETHER.match(nodeid)
            return (group[1] or group[2]).strip("-") if group else nodeid

    return ByPlace(config, log)
