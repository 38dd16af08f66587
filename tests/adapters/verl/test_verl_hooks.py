"""Installing into the real verl: checked, undone, and after it verl's own functions again."""

import importlib
import sys

import pytest

pytest.importorskip("verl.protocol")

import torch
from verl.utils import seqlen_balancing

from megatron_balance import BalanceError
from megatron_balance.adapters.verl import hooks, install, is_installed, settings

NAMES = [row.target.split(":")[1] for row in hooks.hooks()]


def bound():
    """Every object in verl that a hook may replace."""
    owners = [importlib.import_module(name) for name in (hooks.BALANCING, hooks.DECORATOR, hooks.WORKER_GROUP)]
    return {(owner.__name__, name): getattr(owner, name) for owner in owners for name in NAMES if hasattr(owner, name)}


def test_the_plugin_is_loaded_and_inert():
    assert "megatron_balance.adapters.verl.plugin" in sys.modules
    assert not is_installed()
    assert not any(settings.is_hook(function) for function in bound().values())


def test_install_and_undo():
    before = bound()
    adapter = install("Qwen3-8B")
    try:
        assert is_installed()
        assert install("Qwen3-8B") is adapter
        assert seqlen_balancing.calculate_workload(torch.tensor([100])).tolist() == [4_409_238]
        with pytest.raises(BalanceError, match="verl is hooked already with Settings"):
            install("Qwen3-4B")
        assert all(now is not before[key] for key, now in bound().items())
    finally:
        adapter.undo()
    assert not is_installed()
    assert bound() == before
    assert seqlen_balancing.calculate_workload(torch.tensor([100])).tolist() == [24576 * 100 + 100**2]


def test_a_module_that_bound_a_hook_by_value_gets_verls_own_after_undo():
    adapter = install("Qwen3-8B")
    kept = seqlen_balancing.calculate_workload
    adapter.undo()
    assert kept is not seqlen_balancing.calculate_workload
    assert kept(torch.tensor([100])).tolist() == [24576 * 100 + 100**2]


def test_trainers_that_load_later_are_hooked_with_the_first_worker_group():
    adapter = install("Qwen3-8B")
    try:
        trainer = importlib.import_module(hooks.RAY_TRAINER).RayPPOTrainer
        trainers_v1 = importlib.import_module(hooks.V1_TRAINER).PPOTrainer
        # What the hook of func_generator calls first.
        hooks.hook_trainers()
        hooks.hook_trainers()
        assert settings.is_hook(trainer._balance_batch)
        assert settings.is_hook(trainers_v1._balance_batch)
        assert settings.is_hook(importlib.import_module(hooks.RAY_TRAINER).calculate_workload)
    finally:
        adapter.undo()
    assert not settings.is_hook(trainer._balance_batch)
    # Imported while the adapter was installed: the name that it bound hands on to verl's own.
    install("Qwen3-8B").undo()


@pytest.mark.parametrize(
    ("version", "message"), [("0.7.0", "verl is 0.7.0; .* tested on 0.9"), ("0.10.0.dev", "verl is 0.10.0.dev")]
)
def test_another_version_is_named(monkeypatch, version, message):
    monkeypatch.setattr(hooks, "verl_version", lambda: version)
    with pytest.raises(BalanceError, match=message):
        install()
    assert not is_installed()


def test_a_target_that_moved_changes_nothing(monkeypatch):
    before = bound()
    monkeypatch.delattr(seqlen_balancing, "get_group_balanced_partitions")
    with pytest.raises(BalanceError, match=r"cannot hook .*get_group_balanced_partitions in verl 0\.9\.1"):
        install()
    monkeypatch.undo()
    assert not is_installed()
    assert bound() == before


def test_a_parameter_that_went_is_named(monkeypatch):
    monkeypatch.setattr(seqlen_balancing, "calculate_workload", lambda lengths: lengths)
    with pytest.raises(BalanceError, match="it no longer takes seqlen_list"):
        install()
    assert not is_installed()
