"""A small double of slime 0.3: the modules that the adapter hooks, with its signatures and the data flow between them.

`RolloutManager` packs what a rank is sent as slime's does: per-sample fields, cut by `partition`.
"""

from __future__ import annotations

import importlib.metadata
import sys
import types
from types import SimpleNamespace
from typing import Any

import pytest

NAMES = (
    "slime",
    "slime.utils",
    "slime.utils.dp_schedule",
    "slime.observability",
    "slime.observability.rollout_data_utils",
    "slime.ray",
    "slime.ray.rollout",
)


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


class RolloutManager:
    """The part of slime's that hands schedules on."""

    def __init__(self, args: Any, *, module: types.ModuleType) -> None:
        self.args = args
        self.module = module
        self.train_parallel_config: dict[str, int] = parallel_config()

    def split(self, data: dict[str, Any]) -> list[dict[str, Any]]:
        """The data that every rank is sent."""
        schedule = self.module.build_dp_schedule(
            self.args,
            self.train_parallel_config,
            [len(tokens) for tokens in data["tokens"]],
            global_batch_size=self.args.global_batch_size,
            rollout_indices=data["rollout_ids"],
        )
        sent: list[dict[str, Any]] = []
        for partition, indices in zip(*schedule[:2], strict=True):
            rank: dict[str, Any] = {"partition": partition}
            for key in ("tokens", "loss_masks"):
                if key in data:
                    rank[key] = [data[key][sample] for sample in partition]
            rank["micro_batch_indices"] = indices
            self.module.tensorize_rollout_data_for_training(rank)
            sent.append(rank)
        return sent


def put_in_place(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """Makes the double importable as slime 0.3.1. Returns `slime.ray.rollout`."""
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.3.1")
    modules = {name: types.ModuleType(name) for name in NAMES}
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    vars(modules["slime.utils.dp_schedule"])["build_dp_schedule"] = build_dp_schedule
    utils = vars(modules["slime.observability.rollout_data_utils"])
    utils["tensorize_rollout_data_for_training"] = tensorize_rollout_data_for_training
    # Bound by value, as `from … import …` does.
    rollout = modules["slime.ray.rollout"]
    vars(rollout).update(
        build_dp_schedule=build_dp_schedule,
        tensorize_rollout_data_for_training=tensorize_rollout_data_for_training,
        RolloutManager=RolloutManager,
    )
    return rollout


def parallel_config(dp_size: int = 4, *, cp_size: int = 1, vpp_size: int = 1, group: int = 1) -> dict[str, int]:
    """The metrics that slime's trainer reports."""
    return {
        "dp_size": dp_size,
        "cp_size": cp_size,
        "vpp_size": vpp_size,
        "microbatch_group_size_per_vp_stage": group,
    }


def qwen3_4b(**changed: Any) -> SimpleNamespace:
    """slime's arguments for Qwen3-4B on dynamic batches of 9216 tokens, both balance flags given."""
    values: dict[str, Any] = {
        "use_dynamic_batch_size": True,
        "max_tokens_per_gpu": 9216,
        "micro_batch_size": 1,
        "balance_data": True,
        "balance_by_flops": True,
        "global_batch_size": 128,
        "hidden_size": 2560,
        "num_layers": 36,
        "num_attention_heads": 32,
        "group_query_attention": True,
        "num_query_groups": 8,
        "kv_channels": 128,
        "ffn_hidden_size": 9728,
        "swiglu": True,
        "vocab_size": 151936,
        "padded_vocab_size": 151936,
        "num_experts": None,
    }
    return SimpleNamespace(**{**values, **changed})
