"""R17: the ways to install into the real verl, each undone without a trace; what cannot be hooked is refused."""

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
import tomllib
import torch
from verl.utils import seqlen_balancing

from megatron_balance import BalanceError
from megatron_balance.adapters import verl as adapter

ROOT = Path(__file__).parents[3]
MODULES = ("verl.utils.seqlen_balancing", "verl.single_controller.ray.base")
HUNDRED = torch.tensor([100])
VERLS_OWN, QWEN3_8B = [24576 * 100 + 100**2], [4_409_238]


def functions():
    """Every object of the modules that are hooked."""
    return {(name, key): value for name in MODULES for key, value in vars(importlib.import_module(name)).items()}


def run(code, **variables):
    environment = {**os.environ, **variables}
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], env=environment, capture_output=True, text=True, timeout=300
    )


def test_install_and_undo():
    before = functions()
    installed = adapter.install(model="Qwen3-8B")
    try:
        assert adapter.is_installed()
        assert adapter.install(model="Qwen3-8B") is installed
        assert seqlen_balancing.calculate_workload(HUNDRED).tolist() == QWEN3_8B
        with pytest.raises(BalanceError, match="verl is hooked already with CostModel"):
            adapter.install(model="Qwen3-4B")
    finally:
        installed.undo()
    assert not adapter.is_installed()
    assert functions() == before
    assert seqlen_balancing.calculate_workload(HUNDRED).tolist() == VERLS_OWN


@pytest.mark.parametrize("value", [None, "", "0"])
def test_without_its_variable_the_plug_in_does_nothing(value):
    """conftest.py names the plug-in among verl's external modules, in every process of these tests."""
    code = "import verl; from megatron_balance.adapters import verl as adapter; print(adapter.is_installed())"
    output = run(code, **({} if value is None else {"MEGATRON_BALANCE_VERL": value}))
    assert output.stdout.strip() == "False", output.stderr


@pytest.fixture
def entry_points(tmp_path):
    """Metadata as pip writes it for the entry points of this checkout's pyproject.toml, whatever is installed here."""
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["entry-points"]
    lines = [f"{name} = {target}" for name, target in declared["verl.plugins"].items()]
    metadata = tmp_path / "declared-0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: declared\nVersion: 0\n")
    (metadata / "entry_points.txt").write_text("\n".join(["[verl.plugins]", *lines, ""]))
    return os.pathsep.join([str(tmp_path), str(ROOT), os.environ["PYTHONPATH"]])


def test_the_variable_installs_it_by_the_entry_point(entry_points):
    """verl's platform alone is an external module here, so the plug-in is loaded by its entry point."""
    code = (
        "import verl, torch; from verl.utils import seqlen_balancing;"
        "from verl.single_controller.ray import base; from verl.trainer.ppo.v1.trainer_base import PPOTrainer;"
        "hooked = lambda: PPOTrainer._balance_batch.__globals__['__name__'].startswith('megatron_balance');"
        "before = hooked(); base.func_generator(None, '', None, None, None, True);"
        "print(seqlen_balancing.calculate_workload(torch.tensor([100])).tolist(), before, hooked())"
    )
    variables = {"PYTHONPATH": entry_points, "VERL_USE_EXTERNAL_MODULES": "verl_cpu_platform"}
    output = run(code, MEGATRON_BALANCE_VERL="model=Qwen3-8B", **variables)
    # A trainer loads after the plug-in: it is hooked where a worker group is made.
    assert output.stdout.strip() == f"{QWEN3_8B} False True", output.stderr


@pytest.mark.parametrize(("value", "message"), [("model=none-such", "no preset"), ("dispatch=yes", "dispatch=yes")])
def test_an_error_of_the_plug_in_ends_the_process(entry_points, value, message):
    """verl catches every Exception of a plug-in and says nothing."""
    output = run("import verl; print('went on')", MEGATRON_BALANCE_VERL=value, PYTHONPATH=entry_points)
    assert output.returncode == 1
    assert "went on" not in output.stdout
    assert output.stderr.startswith(f"MEGATRON_BALANCE_VERL={value!r}: ")
    assert message in output.stderr
