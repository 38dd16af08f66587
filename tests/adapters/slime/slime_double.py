"""A small double of slime 0.3: the modules that the adapter hooks, with its signatures and flow of data."""

from __future__ import annotations

import importlib.metadata
import sys
import types
from types import SimpleNamespace
from typing import Any

import pytest

NAMES = {
    "build_dp_schedule": "slime.utils.dp_schedule",
    "tensorize_rollout_data_for_training": "slime.observability.rollout_data_utils",
}
"""Functions that are hooked, and their modules."""


def build_dp_schedule(
    args: Any,
    train_parallel_config: dict[str, int],
    total_lengths: list[int],
    *,
    global_batch_size: int,
    rollout_indices: list[int],
) -> Any:
    """Names itself, and refuses what slime refuses."""
    if len(set(rollout_indices)) < global_batch_size:
        raise AssertionError("num_rollouts < global_batch_size")
    return "slime's own"


def tensorize_rollout_data_for_training(rollout_data: dict[str, Any]) -> None:
    """Loss masks become tuples, to show that it ran."""
    if "loss_masks" in rollout_data:
        rollout_data["loss_masks"] = [tuple(mask) for mask in rollout_data["loss_masks"]]


def split(rollout: types.ModuleType, args: Any, data: dict[str, Any]) -> list[dict[str, Any]]:
    """The data that slime's RolloutManager sends to every rank: per-sample fields, cut by `partition`."""
    schedule = rollout.build_dp_schedule(
        args,
        parallel_config(),
        [len(tokens) for tokens in data["tokens"]],
        global_batch_size=args.global_batch_size,
        rollout_indices=data["rollout_ids"],
    )
    sent: list[dict[str, Any]] = []
    for partition, indices in zip(*schedule[:2], strict=True):
        fields = {key: [data[key][sample] for sample in partition] for key in ("tokens", "loss_masks") if key in data}
        sent.append({"partition": partition, "micro_batch_indices": indices, **fields})
        rollout.tensorize_rollout_data_for_training(sent[-1])
    return sent


def put_in_place(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """Makes the double importable as slime 0.3.1. Returns `slime.ray.rollout`, which binds both functions by value."""
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.3.1")
    for name in ("slime", "slime.utils", "slime.observability", "slime.ray", "slime.ray.rollout", *NAMES.values()):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    rollout = sys.modules["slime.ray.rollout"]
    for name, home in NAMES.items():
        for module in (sys.modules[home], rollout):
            setattr(module, name, globals()[name])
    return rollout


def parallel_config(dp_size: int = 4, *, cp_size: int = 1, vpp_size: int = 1, group: int = 1) -> dict[str, int]:
    """The metrics that slime's trainer reports."""
    sizes = {"dp_size": dp_size, "cp_size": cp_size, "vpp_size": vpp_size}
    return {**sizes, "microbatch_group_size_per_vp_stage": group}


def qwen3_4b(**changed: Any) -> SimpleNamespace:
    """slime's arguments for Qwen3-4B on dynamic batches of 9216 tokens, both balance flags given."""
    batches = {"use_dynamic_batch_size": True, "max_tokens_per_gpu": 9216, "micro_batch_size": 1}
    batches |= {"balance_data": True, "balance_by_flops": True, "global_batch_size": 128}
    sizes = {"hidden_size": 2560, "num_layers": 36, "num_attention_heads": 32, "group_query_attention": True}
    sizes |= {"num_query_groups": 8, "kv_channels": 128, "ffn_hidden_size": 9728, "swiglu": True, "num_experts": None}
    return SimpleNamespace(**{**batches, **sizes, "vocab_size": 151936, "padded_vocab_size": 151936, **changed})


def data_of(lengths: list[int]) -> dict[str, Any]:
    """Rollouts of one sample each, half of its tokens in the loss."""
    masks = [[1] * (length // 2) for length in lengths]
    return {"tokens": [[0] * n for n in lengths], "loss_masks": masks, "rollout_ids": list(range(len(lengths)))}


FIVE_LONG = [9000, 9000, 8000, 9000, 9000]
"""On four ranks: two micro-batches each, of which three hold a copy."""


def check_copies_are_masked(sent: list[dict[str, Any]]) -> None:
    """Of `FIVE_LONG` every sample is learnt once."""
    learnt = [0] * 5
    for rank in sent:
        assert [len(held) for held in rank["micro_batch_indices"]] == [1, 1]
        assert all(type(sample) is int for sample in rank["partition"])
        for sample, mask in zip(rank["partition"], rank["loss_masks"], strict=True):
            assert len(mask) == FIVE_LONG[sample] // 2
            learnt[sample] += sum(mask)
    assert learnt == [length // 2 for length in FIVE_LONG]
