"""Refusals of Megatron-Bridge's loop, where Bridge itself is not installed."""

from __future__ import annotations

import sys
import types

import pytest

from megatron_balance import BalanceError
from megatron_balance.mcore import bridge, hooks, install_bridge


@pytest.fixture
def core_hooks():
    yield
    hooks.core_installation.undo()


def bridge_of_version(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    info = types.ModuleType("megatron.bridge.package_info")
    info.__version__ = version  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "megatron.bridge", types.ModuleType("megatron.bridge"))
    monkeypatch.setitem(sys.modules, info.__name__, info)


@pytest.mark.usefixtures("core_hooks")
def test_a_missing_bridge_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "megatron.bridge", None)
    with pytest.raises(BalanceError, match="megatron-bridge is not installed"):
        install_bridge(max_tokens_per_gpu=8192)
    assert bridge.bridge_installation.settings is None


@pytest.mark.usefixtures("core_hooks")
def test_another_release_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    bridge_of_version(monkeypatch, "0.5.1")
    with pytest.raises(BalanceError, match=r"megatron-bridge is 0\.5\.1; .*install megatron-bridge==0\.6\.\*"):
        install_bridge(max_tokens_per_gpu=8192)


@pytest.mark.usefixtures("core_hooks")
def test_a_changed_train_step_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    bridge_of_version(monkeypatch, "0.6.9")
    train = types.ModuleType("megatron.bridge.training.train")
    train.train_step = lambda data_iterator, model, schedule: None  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "megatron.bridge.training", types.ModuleType("megatron.bridge.training"))
    monkeypatch.setitem(sys.modules, train.__name__, train)
    with pytest.raises(BalanceError, match="no longer takes global_state, forward_backward_func"):
        install_bridge(max_tokens_per_gpu=8192)
    assert bridge.bridge_installation.settings is None
