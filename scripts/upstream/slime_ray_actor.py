"""The adapter through slime's real RolloutManager in a real Ray actor, to what its trainer reads.

Run by check_slime.sh with slime_plugin, which hooks slime in this process alone: the actor must get the hooks from
here. The rollout is a debug rollout from a file, as slime loads it with --load-debug-rollout-data.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import torch

from megatron_balance import BalanceError
from megatron_balance.adapters import slime as adapter

DP_SIZE = 4
CAP = 9216
GSM8K_LIKE = [180, 95, 240, 130, 310, 120, 150, 205, 88, 175, 260, 140, 99, 410, 160, 133] * 8


class NoData:
    """A data source that is never asked."""

    def __init__(self, args: Any) -> None:
        pass


def no_rollout(*_: Any, **__: Any) -> None:
    raise AssertionError("the rollout comes from a file")


@pytest.fixture(scope="module")
def connection() -> Iterator[None]:
    hook = {"worker_process_setup_hook": "slime_cpu.stand_in_for_sglang"}
    ray.init(num_cpus=2, include_dashboard=False, configure_logging=False, runtime_env=hook)
    yield
    ray.shutdown()


def make_args(path: Path, *, lengths: list[int], **changed: Any) -> SimpleNamespace:
    values = {
        # A rollout from a file, and no engines, trackers or fault tolerance.
        "debug_train_only": True,
        "load_debug_rollout_data": str(path),
        "load_debug_rollout_data_subsample": None,
        "data_source_path": "slime_ray_actor.NoData",
        "rollout_function_path": "slime_ray_actor.no_rollout",
        "eval_function_path": "slime_ray_actor.no_rollout",
        "global_batch_size": len(lengths),
        "use_dynamic_batch_size": True,
        "max_tokens_per_gpu": CAP,
        "micro_batch_size": 1,
        "balance_data": True,
        "balance_by_flops": True,
        "reward_key": None,
        "advantage_estimator": "grpo",
        "rewards_normalization": False,
        "rollout_top_p": 1.0,
        "rollout_data_transport": "object-store",
        # Qwen3-4B
        "hidden_size": 2560,
        "num_layers": 36,
        "num_attention_heads": 32,
        "group_query_attention": True,
        "num_query_groups": 8,
        "kv_channels": 128,
        "ffn_hidden_size": 9728,
        "swiglu": True,
        "vocab_size": 151936,
        "num_experts": None,
    }
    return DefaultsToNone(**{**values, **changed})


class DefaultsToNone(SimpleNamespace):
    """slime's arguments are hundreds; those that are not given above are off."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


def write_rollout(path: Path, lengths: list[int]) -> None:
    """As slime saves one: sample i is made of the token i, its first half is the prompt."""
    samples = [
        {
            "index": index,
            "group_index": index,
            "prompt": "",
            "tokens": [index] * length,
            "response": "",
            "response_length": length - length // 2,
            "reward": float(index),
            "status": "completed",
            "metadata": {},
        }
        for index, length in enumerate(lengths)
    ]
    torch.save({"rollout_id": 0, "samples": samples}, path)


def rollout_of_ranks(path: Path, lengths: list[int], **changed: Any) -> list[dict[str, Any]]:
    """The batch that the trainer of every data-parallel rank reads, by slime's own process_rollout_data."""
    from slime.ray.rollout import RolloutManager
    from slime.utils.data import process_rollout_data

    write_rollout(path, lengths)
    args = make_args(path, lengths=lengths, **changed)
    manager = RolloutManager.options(num_cpus=1).remote(args, None)
    config = {"dp_size": DP_SIZE, "cp_size": 1, "vpp_size": 1, "microbatch_group_size_per_vp_stage": 1}
    ray.get(manager.set_train_parallel_config.remote(config))
    boxes = ray.get(manager.generate.remote(0))
    ranks = [process_rollout_data(args, boxes, rank, DP_SIZE) for rank in range(DP_SIZE)]
    ray.kill(manager)
    return ranks


def tokens_of_microbatches(rank: dict[str, Any]) -> list[int]:
    return [sum(rank["total_lengths"][index] for index in held) for held in rank["micro_batch_indices"]]


@pytest.mark.usefixtures("connection")
def test_the_actor_balances_under_the_cap(tmp_path: Path) -> None:
    lengths = [7000, 6500, 6000, 5000, 4200, 3600, 3000, 2500, *GSM8K_LIKE]
    ranks = rollout_of_ranks(tmp_path / "rollout.pt", lengths)
    for rank in ranks:
        assert max(tokens_of_microbatches(rank)) <= CAP
        assert [tokens[0].item() for tokens in rank["tokens"]] == rank["partition"]
        assert rank["local_raw_reward"] == [float(sample) for sample in rank["partition"]]
    assert sorted(sample for rank in ranks for sample in rank["partition"]) == list(range(len(lengths)))
    cost = adapter.SlimeOptions().cost_model(make_args(tmp_path, lengths=lengths))
    costs = [sum(map(cost, rank["total_lengths"])) for rank in ranks]
    assert max(costs) * DP_SIZE <= 1.005 * sum(costs)


@pytest.mark.usefixtures("connection")
def test_what_fills_an_empty_microbatch_has_no_loss(tmp_path: Path) -> None:
    lengths = [9000, 9000, 9000, 8000, 9000]
    ranks = rollout_of_ranks(tmp_path / "rollout.pt", lengths)
    learnt = [0] * len(lengths)
    for rank in ranks:
        assert [len(held) for held in rank["micro_batch_indices"]] == [1, 1]
        assert all(type(sample) is int for sample in rank["partition"])
        for sample, tokens, mask in zip(rank["partition"], rank["tokens"], rank["loss_masks"], strict=True):
            assert tokens.tolist() == [sample] * lengths[sample]
            assert mask.numel() == lengths[sample] - lengths[sample] // 2
            learnt[sample] += int(mask.sum())
        assert rank["rollout_mask_sums"].tolist() == [lengths[s] - lengths[s] // 2 for s in rank["partition"]]
    # Every response token once, the copies of sample 3 not at all.
    assert learnt == [length - length // 2 for length in lengths]
    assert sum(rank["partition"].count(3) for rank in ranks) == 1 + (2 * DP_SIZE - len(lengths))


@pytest.mark.usefixtures("connection")
def test_without_a_flag_the_actor_runs_slimes_own(tmp_path: Path) -> None:
    lengths = [100 + index for index in range(16)]
    off = {"use_dynamic_batch_size": False, "balance_data": False, "balance_by_flops": False}
    ranks = rollout_of_ranks(tmp_path / "rollout.pt", lengths, **off)
    assert [rank["partition"] for rank in ranks] == [list(range(rank, 16, DP_SIZE)) for rank in range(DP_SIZE)]


@pytest.mark.usefixtures("connection")
def test_hooks_that_come_too_late_are_refused() -> None:
    """The actor's class has been pickled by the tests above."""
    adapter.install().undo()
    with pytest.raises(BalanceError, match="before create_rollout_manager"):
        adapter.install()
    assert not adapter.is_installed()
