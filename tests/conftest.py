"""Settings of all tests: examples repeat and are not timed; what needs other packages runs where they are.

Adapters with a requirements.txt are tested in environments of their own (scripts/check adapters). This file is not in
tests/adapters: pytest would put that folder on the path, and its folders bear the names of packages.
"""

import os
import sys
from pathlib import Path

import pytest
from hypothesis import Phase, settings

ADAPTERS = Path(__file__).parent / "adapters"
ON_ONE_WORKER = {"megatron", "runtime", "test_report_browser.py"}
"""Folders and files of which a worker imports Megatron, or starts ranks or a browser, once for all tests."""
collect_ignore = [
    str(requirements.parent)
    for requirements in ADAPTERS.glob("*/requirements.txt")
    if not sys.prefix.endswith(f"venv-{requirements.parent.name}")
]

# The same examples in every run; `make test-all` explores others. Machines are shared: no example has a deadline.
settings.register_profile("repeatable", deadline=None, derandomize=True)
settings.register_profile("exploring", deadline=None)
# For scripts/mutants.py, which asks whether a test fails, not for the smallest example.
settings.register_profile("first", deadline=None, derandomize=True, phases=[Phase.explicit, Phase.generate])
settings.load_profile("exploring" if os.environ.get("MEGATRON_BALANCE_EXPLORE") else "repeatable")


def pytest_itemcollected(item: pytest.Item) -> None:
    """Marks them for pytest-xdist."""
    for place in ON_ONE_WORKER.intersection(item.path.relative_to(ADAPTERS.parent).parts):
        if not any(item.iter_markers("xdist_group")):
            item.add_marker(pytest.mark.xdist_group(place))
