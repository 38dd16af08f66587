"""A pytest plugin: slime's own tests with the adapter on. `pytest -p slime_plugin` from a checkout of slime.

With `--balance-every-scenario` the tests of the schedule get balanced arguments throughout, so that their
invariants are asserted of balanced schedules also where a test left balancing off.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
from any_module import stand_in_for

from megatron_balance.adapters import slime


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--balance-every-scenario", action="store_true", help="turn balancing on in make_args()")


def pytest_configure(config: pytest.Config) -> None:
    # Before a test module is collected: it binds build_dp_schedule by value.
    stand_in_for("sglang")  # slime imports its engine, and starts it where there are GPUs
    slime.install()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--balance-every-scenario"):
        return
    for names in {id(item.module): vars(item.module) for item in items if isinstance(item, pytest.Function)}.values():
        names["make_args"] = _balanced(names["make_args"])


def _balanced(make_args: Any) -> Any:
    @functools.wraps(make_args)
    def make(**chosen: Any) -> Any:
        dynamic = bool(chosen.get("use_dynamic_batch_size"))
        return make_args(**{**chosen, "balance_data": True, "balance_by_flops": dynamic})

    return make
