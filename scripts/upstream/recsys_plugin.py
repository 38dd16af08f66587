"""A pytest plugin: the tests of recsys-examples on CPU and gloo, with the adapter on. `pytest -p recsys_plugin`.

RECSYS_EXAMPLES names the `examples` folder of a checkout; one process a rank, named by RANK and WORLD_SIZE as torchrun
does. With `--upstream-alone` the adapter stays off, to see what upstream does by itself.
"""

from __future__ import annotations

import os
from pathlib import Path

import cpu_shim
import pytest
import recsys_cpu

from megatron_balance.adapters import recsys


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--upstream-alone", action="store_true", help="do not install megatron_balance")


def pytest_configure(config: pytest.Config) -> None:
    cpu_shim.share_gloo_device()  # upstream's tests make hundreds of groups
    recsys_cpu.stand_in(Path(os.environ["RECSYS_EXAMPLES"]))
    if not config.getoption("--upstream-alone"):
        recsys.install()


def pytest_unconfigure(config: pytest.Config) -> None:
    del config
    if recsys.is_installed():
        recsys.install().undo()


def pytest_report_header(config: pytest.Config) -> str:
    del config
    return f"megatron_balance: recsys-examples is {'' if recsys.is_installed() else 'not '}hooked"
