"""The real verl loads the plug-in by its entry point: opted in, it is hooked; where that fails, the process ends."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import tomllib

pytest.importorskip("verl.protocol")

ROOT = Path(__file__).parents[3]
SAY = "import verl; from megatron_balance.adapters.verl import is_installed; print('installed:', is_installed())"


@pytest.fixture
def entry_points(tmp_path):
    """Metadata as pip writes it for the entry points of this checkout's pyproject.toml, whatever is installed here."""
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["entry-points"]
    lines = [f"{name} = {target}" for name, target in declared["verl.plugins"].items()]
    metadata = tmp_path / "declared-0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: declared\nVersion: 0\n")
    (metadata / "entry_points.txt").write_text("\n".join(["[verl.plugins]", *lines, ""]))
    return tmp_path


def import_verl(entry_points, **variables):
    path = os.pathsep.join([str(entry_points), str(ROOT), os.environ["PYTHONPATH"]])
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SAY],
        env={**os.environ, **variables, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_the_variable_installs_it(entry_points):
    found = import_verl(entry_points, MEGATRON_BALANCE_VERL="model=Qwen3-8B dispatch=yes")
    assert found.stdout.strip() == "installed: True", found.stderr


def test_an_error_is_not_swallowed(entry_points):
    """verl catches every Exception of a plug-in and says nothing."""
    found = import_verl(entry_points, MEGATRON_BALANCE_VERL="model=none-such")
    assert found.returncode == 1
    assert "installed" not in found.stdout
    assert found.stderr.startswith("MEGATRON_BALANCE_VERL='model=none-such': the model")
