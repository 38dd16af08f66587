"""Refusals of Megatron-Bridge's loop, where Bridge itself is not installed."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest

from megatron_balance import BalanceError, hooking
from megatron_balance.mcore import bridge, install_bridge


@pytest.mark.parametrize(
    ("version", "message"),
    [
        pytest.param(None, r"pip install megatron-bridge==0\.6\.2\): there is no module", id="missing"),
        pytest.param("0.5.1", r"megatron-bridge is 0\.5\.1; .*install megatron-bridge==0\.6\.2", id="other-release"),
        pytest.param("0.7.9", "no longer takes global_state, forward_backward_func", id="changed-train-step"),
    ],
)
def test_a_bridge_that_cannot_be_hooked_is_named(
    monkeypatch: pytest.MonkeyPatch, version: str | None, message: str
) -> None:
    modules: dict[str, Any] = (
        {"": None}
        if version is None
        else {"": {}, ".training": {}, ".training.train": {"train_step": lambda data_iterator, model, schedule: None}}
    )
    for name, settings in modules.items():
        module = None if settings is None else types.ModuleType(f"megatron.bridge{name}")
        vars(module or types.SimpleNamespace()).update(settings or {})
        monkeypatch.setitem(sys.modules, f"megatron.bridge{name}", module)
    if version is not None:
        monkeypatch.setattr(hooking.metadata, "version", lambda system: version)
    with pytest.raises(BalanceError, match=message):
        install_bridge(max_tokens_per_gpu=8192)
    assert bridge.bridge_installation.settings is None
