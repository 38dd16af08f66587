"""The adapter's hooks on a double of slime's modules: where they are bound, and masks where they belong."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator

import pytest
from slime_double import FIVE_LONG, NAMES, check_copies_are_masked, data_of, put_in_place, qwen3_4b, split

from megatron_balance import BalanceError
from megatron_balance.adapters import slime


@pytest.fixture
def rollout(monkeypatch: pytest.MonkeyPatch) -> Iterator[types.ModuleType]:
    """`slime.ray.rollout` of the double; nothing stays installed."""
    yield put_in_place(monkeypatch)
    slime.adapter.undo()


def bound(rollout: types.ModuleType) -> list[object]:
    return [vars(module)[name] for name, home in NAMES.items() for module in (sys.modules[home], rollout)]


def test_both_functions_are_bound_everywhere_and_given_back(rollout: types.ModuleType) -> None:
    before = bound(rollout)
    installed = slime.install()
    assert slime.is_installed()
    assert not set(before) & set(bound(rollout))
    installed.undo()
    assert bound(rollout) == before


def test_masked_copies_carry_no_loss(rollout: types.ModuleType) -> None:
    slime.install()
    data = data_of(FIVE_LONG)
    sent = split(rollout, qwen3_4b(global_batch_size=5), data)
    check_copies_are_masked(sent)
    assert all(isinstance(mask, tuple) for rank in sent for mask in rank["loss_masks"]), "slime's own must run after"
    assert all(all(mask) for mask in data["loss_masks"]), "the rollout's own masks are left alone"


def test_copies_without_masks_are_refused(rollout: types.ModuleType) -> None:
    slime.install()
    data = data_of(FIVE_LONG)
    del data["loss_masks"]
    with pytest.raises(BalanceError, match="no loss_masks"):
        split(rollout, qwen3_4b(global_batch_size=5), data)


def test_too_late_is_refused(rollout: types.ModuleType) -> None:
    """Ray has pickled the actor's class."""
    metadata = types.SimpleNamespace(last_export_cluster_and_job="session", class_name="RolloutManager")
    vars(rollout)["RolloutManager"] = types.SimpleNamespace(__ray_metadata__=metadata)
    before = bound(rollout)
    with pytest.raises(BalanceError, match="RolloutManager was started already"):
        slime.install()
    assert bound(rollout) == before
