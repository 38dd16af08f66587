"""The adapter's hooks on a double of slime's modules: checked, undone, and masks where they belong."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator

import pytest
from slime_double import RolloutManager, put_in_place, qwen3_4b

from megatron_balance import BalanceError
from megatron_balance.adapters import slime


@pytest.fixture
def rollout(monkeypatch: pytest.MonkeyPatch) -> Iterator[types.ModuleType]:
    """`slime.ray.rollout` of the double; nothing stays installed."""
    yield put_in_place(monkeypatch)
    if slime.is_installed():
        slime.install().undo()


def bound() -> list[object]:
    return [
        sys.modules[module].__dict__[name]
        for module, name in (
            ("slime.utils.dp_schedule", "build_dp_schedule"),
            ("slime.ray.rollout", "build_dp_schedule"),
            ("slime.observability.rollout_data_utils", "tensorize_rollout_data_for_training"),
            ("slime.ray.rollout", "tensorize_rollout_data_for_training"),
        )
    ]


@pytest.mark.usefixtures("rollout")
def test_install_binds_everywhere_and_undo_restores() -> None:
    before = bound()
    assert not slime.is_installed()
    installed = slime.install()
    assert slime.is_installed()
    assert all(new is not old for new, old in zip(bound(), before, strict=True))
    once = bound()
    slime.install()  # once more changes nothing
    assert bound() == once
    installed.undo()
    assert bound() == before
    assert not slime.is_installed()
    installed.undo()  # nor does undoing twice


def test_masked_copies_carry_no_loss(rollout: types.ModuleType) -> None:
    slime.install()
    lengths = [9000, 9000, 8000, 9000, 9000]
    data = {
        "tokens": [[sample] * length for sample, length in enumerate(lengths)],
        "loss_masks": [[1] * (length // 2) for length in lengths],
        "rollout_ids": list(range(5)),
    }
    sent = RolloutManager(qwen3_4b(global_batch_size=5), module=rollout).split(data)
    learnt = [0] * 5
    for rank in sent:
        assert [len(held) for held in rank["micro_batch_indices"]] == [1, 1]
        assert all(type(sample) is int for sample in rank["partition"])
        assert all(isinstance(mask, tuple) for mask in rank["loss_masks"]), "slime's own must run after"
        for sample, mask in zip(rank["partition"], rank["loss_masks"], strict=True):
            assert len(mask) == lengths[sample] // 2
            learnt[sample] += sum(mask)
    assert learnt == [length // 2 for length in lengths]
    assert all(all(mask) for mask in data["loss_masks"]), "the rollout's own masks are left alone"


def test_copies_without_masks_are_refused(rollout: types.ModuleType) -> None:
    slime.install()
    data = {"tokens": [[0] * 9000] * 5, "rollout_ids": list(range(5))}
    with pytest.raises(BalanceError, match="no loss_masks"):
        RolloutManager(qwen3_4b(global_batch_size=5), module=rollout).split(data)


def test_too_late_is_refused(rollout: types.ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray has pickled the actor's class."""
    metadata = types.SimpleNamespace(last_export_cluster_and_job="session", class_name="RolloutManager")
    monkeypatch.setattr(rollout, "RolloutManager", types.SimpleNamespace(__ray_metadata__=metadata))
    before = bound()
    with pytest.raises(BalanceError, match="RolloutManager was started already"):
        slime.install()
    assert bound() == before
    assert not slime.is_installed()
