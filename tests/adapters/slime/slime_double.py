"""A small double of slime 0.3: the modules that the adapter hooks, with its signatures and flow of data."""

import importlib.metadata
import sys
import types
from itertools import chain
from pathlib import Path
from types import SimpleNamespace

SCHEDULE = "slime.utils.dp_schedule"


def build_dp_schedule(args, train_parallel_config, total_lengths, *, global_batch_size, rollout_indices):
    """One step: as many micro-batches as the tokens fill, whatever the cap; refuses what slime refuses."""
    if len(set(rollout_indices)) < global_batch_size:
        raise AssertionError("num_rollouts < global_batch_size")
    dp_size, samples = train_parallel_config["dp_size"], range(len(total_lengths))
    per_rank = max(-(-sum(total_lengths) // ((args.max_tokens_per_gpu or 1) * dp_size)), 1)
    if per_rank * dp_size > len(samples):
        raise AssertionError(f"could only produce {len(samples)} mbs")
    slots = [
        [[*samples[rank + dp_size * slot :: dp_size * per_rank]] for slot in range(per_rank)] for rank in range(dp_size)
    ]
    partitions = [[*chain.from_iterable(indices)] for indices in slots]
    places = [[[*map(part.index, ids)] for ids in indices] for part, indices in zip(partitions, slots, strict=True)]
    return partitions, places, [per_rank], [global_batch_size]


def put_in_place(monkeypatch, *, checkout=None):
    """Makes the double, or the schedule of a checkout, importable as slime 0.3.1.

    Returns `slime.ray.rollout`, which binds the function by value: without Ray and engines.
    """
    version = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.3.1" if name == "slime" else version(name))
    for name in ("slime", "slime.utils", "slime.ray", "slime.ray.rollout", SCHEDULE):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    if checkout:
        for name in ("slime", "slime.utils"):
            vars(sys.modules[name])["__path__"] = [str(Path(checkout, *name.split(".")))]
        monkeypatch.delitem(sys.modules, SCHEDULE)
        importlib.import_module(SCHEDULE)
    else:
        vars(sys.modules[SCHEDULE])["build_dp_schedule"] = build_dp_schedule
    rollout = sys.modules["slime.ray.rollout"]
    vars(rollout)["build_dp_schedule"] = vars(sys.modules[SCHEDULE])["build_dp_schedule"]
    return rollout


def parallel_config(dp_size=4, *, cp_size=1, vpp_size=1, group=1):
    """The metrics that slime's trainer reports."""
    sizes = {"dp_size": dp_size, "cp_size": cp_size, "vpp_size": vpp_size}
    return {**sizes, "microbatch_group_size_per_vp_stage": group}


def qwen3_4b(**changed):
    """slime's arguments for Qwen3-4B on dynamic batches of 9216 tokens, both balance flags given."""
    batches = {"use_dynamic_batch_size": True, "max_tokens_per_gpu": 9216, "micro_batch_size": 1}
    batches |= {"balance_data": True, "balance_by_flops": True, "global_batch_size": 128}
    sizes = {"hidden_size": 2560, "num_layers": 36, "num_attention_heads": 32, "group_query_attention": True}
    sizes |= {"num_query_groups": 8, "kv_channels": 128, "ffn_hidden_size": 9728, "swiglu": True, "num_experts": None}
    sizes |= dict.fromkeys(("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim"))
    return SimpleNamespace(**{**batches, **sizes, "vocab_size": 151936, "padded_vocab_size": 151936, **changed})


FIVE_LONG = [6000] * 5
"""On four ranks two micro-batches each, of which three would be empty; slime runs one of 12000 tokens."""
