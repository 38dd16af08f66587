"""The package as a stranger meets it: light to import, without traces of one machine."""

import os
import re
import subprocess
import sys
from pathlib import Path

import tomllib

import megatron_balance

ROOT = Path(__file__).parents[1]


def test_importing_the_package_loads_neither_torch_nor_megatron():
    code = "import sys, megatron_balance, megatron_balance.cli; print(*sorted({m.split('.')[0] for m in sys.modules}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    loaded = set(done.stdout.split())
    assert "numpy" in loaded
    assert loaded.isdisjoint({"torch", "megatron", "transformers", "rich", "pyarrow"})


def test_public_names_exist_and_are_few():
    assert set(megatron_balance.__all__) == {
        "BalanceError",
        "CostModel",
        "DataSchedule",
        "Forest",
        "Limits",
        "ModelShape",
        "Topology",
        "__version__",
        "balance",
        "build_data_schedule",
        "calculate_fwd_flops",
    }
    assert all(hasattr(megatron_balance, name) for name in megatron_balance.__all__)
    assert issubclass(megatron_balance.BalanceError, ValueError)


def test_versions_are_those_of_pyproject():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert megatron_balance.__version__ == project["version"]
    assert f"\nversion: {project['version']}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"## {project['version'].partition('.dev')[0]} " in (ROOT / "CHANGELOG.md").read_text()
    least = project["requires-python"].removeprefix(">=")  # fault: the README said another
    for page in ("README.md", "docs/quickstart.md"):
        assert f"Python {least} or newer" in " ".join((ROOT / page).read_text().split())


def test_extras_install_something_and_nothing_installs_a_name_that_nobody_owns():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert all(project["optional-dependencies"].values())
    files = [path for path in ROOT.glob("*.md") if path.name != "CONTRIBUTING.md"]
    for folder in ("docs", "scripts", "benchmarks", "megatron_balance"):
        files += [path for path in (ROOT / folder).rglob("*") if path.suffix in (".md", ".sh", ".py", "")]
    named = [path for path in files if path.is_file() and "pip install megatron-balance" in path.read_text()]
    assert named == []


def test_find_python_passes_over_a_shim_that_fails(tmp_path):
    shim = tmp_path / "python3.12"
    shim.write_text("#!/bin/sh\necho broken shim >&2\nexit 127\n")
    shim.chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    script = ROOT / ".ci" / "find_python.sh"
    found = subprocess.run([script], capture_output=True, text=True, check=True, env=environment)
    assert "broken shim" not in found.stderr
    code = "import sys; print(sys.version_info >= (3, 12))"
    assert subprocess.run([found.stdout.strip(), "-c", code], capture_output=True, check=True).stdout == b"True\n"


def test_no_file_names_a_folder_of_one_machine():
    pattern = re.compile(r"/(root|home/\w+|work|Users/\w+)/")
    made_on_the_spot = {"build", "dist", "__pycache__", "megatron_balance.egg-info"}
    kinds = {".py", ".sh", ".toml", ".md", ".txt", ".yml", ""}
    for folder, subfolders, names in os.walk(ROOT):
        subfolders[:] = [name for name in subfolders if name == ".ci" or not name.startswith(".")]
        subfolders[:] = [name for name in subfolders if name not in made_on_the_spot]
        for file in (Path(folder, name) for name in names):
            # A worktree's .git is a file that names its repository; this file has to spell the pattern.
            if file.suffix in kinds and file.name != ".git" and file != Path(__file__):
                found = pattern.search(file.read_text(encoding="utf-8", errors="ignore"))
                assert found is None, f"{file.relative_to(ROOT)} names {found[0] if found else ''}"
