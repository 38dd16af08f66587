"""A pytest plugin: AReaL's own tests with the adapter on. `pytest -p areal_plugin` from a checkout of AReaL.

AReaL's redistribution test asks for GPUs and starts `torchrun` with NCCL. It runs on CPU: check.sh puts a
`torchrun` on PATH whose ranks begin with areal_on_gloo.py, and here the platform claims as many devices as it asks for.
"""

from __future__ import annotations

import os

import pytest

from megatron_balance.adapters import areal


def pytest_configure(config: pytest.Config) -> None:
    # Before a test module is collected: some bind _dispatch_tensors and split_and_unpad_tensor by value.
    # The cost is tokens unless MODEL names one: AReaL's assertions are about tokens.
    areal.install(model=os.environ.get("MODEL"))
    from areal.infra.platforms import current_platform

    assert current_platform.device_type == "cpu", "this check is for machines without an accelerator"
    current_platform.device_count = lambda: 8


def pytest_unconfigure(config: pytest.Config) -> None:
    areal.install(model=os.environ.get("MODEL")).undo()


def pytest_report_header(config: pytest.Config) -> str:
    return f"megatron_balance: AReaL is hooked, the cost is {os.environ.get('MODEL') or 'tokens'}"
