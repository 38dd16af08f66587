"""The launcher: it runs scripts and modules as Python would, and says in one line what is wrong."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def launch(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "megatron_balance.launch", *arguments]
    return subprocess.run(command, text=True, capture_output=True, timeout=120, check=False)


def test_a_script_gets_its_arguments_and_its_own_folder(tmp_path: Path) -> None:
    (tmp_path / "neighbour.py").write_text("WORD = 'found'\n")
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, neighbour\n"
        "from megatron.training import training\n"
        "print(__name__, sys.argv[1:], neighbour.WORD, training.get_forward_backward_func.__wrapped__.__module__)\n"
    )
    done = launch("--cpu", str(script), "--balance-data", "x")
    assert done.returncode == 0, done.stderr
    assert "__main__ ['--balance-data', 'x'] found megatron.core.pipeline_parallel.schedules" in done.stdout


def test_one_import_line_installs_the_hooks(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import megatron_balance.mcore.autoinstall\n"
        "from megatron.training import training\n"
        "print(hasattr(training.get_forward_backward_func, '__wrapped__'))\n"
    )
    done = subprocess.run([sys.executable, str(script)], text=True, capture_output=True, timeout=120, check=False)
    assert done.stdout.split()[-1] == "True", done.stderr


def test_a_missing_script_is_named() -> None:
    done = launch("nowhere.py", "--balance-data")
    assert done.returncode == 1
    assert "there is no script 'nowhere.py'" in done.stderr
    assert "Traceback" not in done.stderr


def test_wrong_flags_end_the_run_with_one_line(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("from megatron.training.arguments import parse_args\nparse_args()\n")
    done = launch("--cpu", str(script), "--balance-by-flops", "--calculate-per-token-loss")
    assert done.returncode == 1
    assert done.stderr.strip().splitlines()[-1].startswith("megatron_balance: --balance-by-flops is set: without")
    assert "Traceback" not in done.stderr
