"""TorchSpec: what is hooked, checked and undone; the launcher."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron_balance import BalanceError
from megatron_balance.adapters import torchspec

HOOKED = {
    "A": {"_partition_results"},
    "B": {"_partition_results", "try_dispatch_batch", "get_status"},
    "C": {"_partition_results", "try_dispatch_batch", "get_status", "_prepare_dataset"},
}


def hooked_class(upstream):
    return upstream.AsyncTrainingController.__ray_metadata__.modified_class


@pytest.mark.parametrize("approach", HOOKED)
def test_each_approach_replaces_its_methods_and_undo_restores_the_very_objects(install, upstream, approach):
    before = dict(vars(hooked_class(upstream)))
    patches = install(approach)
    after = vars(hooked_class(upstream))
    assert {name for name in before if after[name] is not before[name]} == HOOKED[approach]
    assert torchspec.is_installed()
    patches.undo()
    assert dict(vars(hooked_class(upstream))) == before
    assert not torchspec.is_installed()


def test_a_class_that_ray_has_not_decorated_is_hooked_itself(install, upstream, monkeypatch):
    plain = hooked_class(upstream).__ray_actor_class__
    monkeypatch.setattr(upstream, "AsyncTrainingController", plain)
    before = plain._partition_results
    patches = install("A")
    assert plain._partition_results is not before
    patches.undo()
    assert plain._partition_results is before


def test_presorting_without_a_window_leaves_dispatches_alone(install, upstream):
    before = vars(hooked_class(upstream))["try_dispatch_batch"]
    install("C", window=1)
    assert vars(hooked_class(upstream))["try_dispatch_batch"] is before


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"approach": "D"}, "approach is 'D'"),
        ({"approach": "B", "window": 1}, "window is 1"),
        ({"approach": "B", "window": 5}, "window is 5"),
        ({"approach": "A", "cost": "flops"}, "cost is 'flops'"),
        ({"approach": "B", "cost": "tokens"}, "cost is 'tokens' with approach B"),
        ({"approach": "C", "bucket_batches": 0}, "bucket_batches is 0"),
    ],
)
def test_an_argument_that_cannot_be_is_named(install, upstream, arguments, named):
    with pytest.raises(BalanceError, match=named):
        install(**arguments)
    assert not torchspec.is_installed()


def test_another_version_is_refused_with_both_versions_named(install, upstream, tmp_path, monkeypatch):
    (tmp_path / "torchspec").mkdir()
    (tmp_path / "torchspec" / "__init__.py").touch()
    (tmp_path / "version.txt").write_text("0.2.0\n")
    for name in [name for name in sys.modules if name.startswith("torchspec")]:
        del sys.modules[name]
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(BalanceError, match=r"torchspec is 0\.2\.0.*0\.1\.0"):
        install("A")


@pytest.mark.parametrize("folder", ["empty", "of that name"])
def test_a_missing_torchspec_is_told(monkeypatch, tmp_path, folder):
    if folder == "of that name":
        (tmp_path / "torchspec").mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path), *(entry for entry in sys.path if "double" not in entry)])
    with pytest.raises(BalanceError, match="torchspec is not installed"):
        torchspec.install("A")


def test_a_controller_that_runs_already_is_no_silent_miss(install, upstream):
    upstream.AsyncTrainingController.remote(SimpleNamespace(per_dp_rank_batch_size=1), 1)
    with pytest.raises(BalanceError, match="started already"):
        install("A")


def test_the_launcher_takes_its_flags_and_leaves_torchspec_the_others(tmp_path):
    report = tmp_path / "report.json"
    command = [sys.executable, "-m", "megatron_balance.adapters.torchspec", "--balance-approach", "B"]
    command += ["--balance-window", "3", "--config", "a.yaml", "training.micro_batch_size=2"]
    path = os.pathsep.join([str(Path(__file__).parent / "double"), *filter(None, sys.path)])
    environment = os.environ | {"TRAIN_ENTRY_REPORT": str(report), "PYTHONPATH": path}
    subprocess.run(command, check=True, env=environment)
    written = json.loads(report.read_text())
    assert written["arguments"] == ["--config", "a.yaml", "training.micro_batch_size=2"]
    assert written["status"]["balance_delay_limit_dispatches"] == 6


def test_importing_the_adapter_imports_neither_torchspec_nor_torch():
    script = (
        "import sys; from megatron_balance.adapters import torchspec; assert not torchspec.is_installed(); "
        "assert not {'torchspec', 'torch', 'ray'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
