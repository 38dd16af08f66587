"""A pytest plugin that runs verl's own tests with the adapter on, in this process and in those that the tests start.

MEGATRON_BALANCE_VERL=1 python -m pytest -p verl_plugin ...
"""

import os

import pytest


def pytest_configure(config: pytest.Config) -> None:
    os.environ.setdefault("MEGATRON_BALANCE_VERL", "1")
    os.environ["VERL_PLATFORM"] = "cpu"
    # verl imports these itself, in Ray's workers and in spawned processes as well.
    os.environ["VERL_USE_EXTERNAL_MODULES"] = "verl_cpu_platform,megatron_balance.adapters.verl.plugin"
    import verl  # noqa: F401

    from megatron_balance.adapters.verl import is_installed

    if not is_installed():
        raise pytest.UsageError("verl was imported and the adapter is not installed in it.")


def pytest_unconfigure(config: pytest.Config) -> None:
    from megatron_balance.adapters.verl import is_installed

    # A test that took the hooks out would have run the rest without them.
    assert is_installed()
