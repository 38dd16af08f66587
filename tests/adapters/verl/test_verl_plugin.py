"""The plug-in does nothing unless asked, and ends the process where it cannot do as asked."""

import subprocess
import sys
from pathlib import Path

import pytest
import tomllib

from megatron_balance import BalanceError
from megatron_balance.adapters.verl import is_installed
from megatron_balance.adapters.verl.plugin import install_from, read_options

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("environ", [{}, {"MEGATRON_BALANCE_VERL": ""}, {"MEGATRON_BALANCE_VERL": "0"}])
def test_without_the_variable_nothing_is_installed(environ):
    install_from(environ)
    assert not is_installed()


def test_options_are_read():
    assert read_options("1") == {}
    assert read_options("model=/models/a cost=flops keep_minibatch=no dispatch=infer,train") == {
        "model": "/models/a",
        "cost": "flops",
        "keep_minibatch": False,
        "dispatch": ("infer", "train"),
    }
    with pytest.raises(BalanceError, match="modle=x"):
        read_options("modle=x")


def test_an_error_ends_the_process():
    with pytest.raises(SystemExit, match=r"MEGATRON_BALANCE_VERL='model=none-such'.*Qwen3-8B"):
        install_from({"MEGATRON_BALANCE_VERL": "model=none-such"})


def test_the_entry_point_is_the_plugin():
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert pyproject["project"]["entry-points"]["verl.plugins"] == {
        "megatron_balance": "megatron_balance.adapters.verl.plugin"
    }


def test_importing_the_adapter_loads_neither_torch_nor_verl():
    code = (
        "import sys; import megatron_balance.adapters.verl, megatron_balance.adapters.verl.plugin;"
        "assert not {'torch', 'verl', 'ray'} & set(sys.modules), set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={})
