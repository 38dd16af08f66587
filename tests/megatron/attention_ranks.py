"""One rank that runs random plans of dynamic context parallelism, attention only, and compares every token it holds.

`forked_runs.train` runs it, or

    torchrun --nproc-per-node 8 tests/megatron/attention_ranks.py FOLDER --num-plans 2500 --context-parallel-size 2

Reference is the attention of one rank over each sample alone, outputs and gradients, in double precision. Groups are
counted by size: 1, 2, 4 …
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from dynamic_plans import random_schedule
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from megatron_balance.cost.model import CostModel
from megatron_balance.mcore.dynamic_cp.groups import ContextGroups, make_context_groups
from megatron_balance.mcore.thd.context_parallel import partitioned_indices
from megatron_balance.planner.dynamic_cp_schedule import DynamicCpSchedule
from megatron_balance.topology import Limits, Topology

TIMEOUT = timedelta(seconds=60)
HEADS, QUERY_GROUPS, CHANNELS = 2, 1, 4
TOLERANCE = 1e-12


def main() -> None:
    from megatron.core import parallel_state
    from megatron.core.transformer.transformer_config import TransformerConfig

    from megatron_balance.mcore.thd.attention import ThdAttention

    folder, *flags = sys.argv[1:]
    Path(folder).mkdir(parents=True, exist_ok=True)
    parser = argparse.ArgumentParser()
    for name in ("num-plans", "context-parallel-size", "seed"):
        parser.add_argument(f"--{name}", type=int, default=1)
    args = parser.parse_known_args(flags)[0]
    dist.init_process_group("gloo", timeout=TIMEOUT)
    parallel_state.initialize_model_parallel(
        context_parallel_size=args.context_parallel_size, create_gloo_process_groups=False
    )
    topology = Topology(
        dist.get_world_size() // args.context_parallel_size, cp_size=args.context_parallel_size, dynamic_cp=True
    )
    groups = make_context_groups(topology.dynamic_cp_sizes, timeout=TIMEOUT)
    config = TransformerConfig(num_layers=1, hidden_size=HEADS * CHANNELS, num_attention_heads=HEADS)
    config.context_parallel_size, config.attention_dropout = args.context_parallel_size, 0.0
    own = SimpleNamespace(cp=parallel_state.get_context_parallel_group())
    attention = ThdAttention(config, 1, None, "self", pg_collection=own)
    worst, num_tokens, num_groups = 0.0, 0, [0] * len(topology.dynamic_cp_sizes)
    started = time.perf_counter()
    for plan in range(args.num_plans):
        draw = random.Random(args.seed * 1_000_003 + plan)
        lengths = [draw.randint(1, 40) for _ in range(draw.randint(1, 24))]
        schedule = random_schedule(
            lengths,
            topology=topology,
            limits=Limits(draw.randint(8, 64)),
            cost_model=CostModel(linear=10, quadratic=1),
            rows=draw.choice((0, 0, 1, 2)),
            seed=plan,
        )
        leaf = dist.get_rank()
        for slot, size in zip(schedule.ranks[leaf], schedule.cp_sizes[leaf], strict=True):
            if slot:
                difference, tokens = run_slot(attention, schedule, slot=slot, size=size, groups=groups, plan=plan)
                worst, num_tokens = max(worst, difference), num_tokens + tokens
                num_groups[size.bit_length() - 1] += 1
    row: dict[str, Any] = {"worst": worst, "tokens": num_tokens, "groups": num_groups}
    row["seconds"] = time.perf_counter() - started
    (Path(folder) / f"rank{os.environ['RANK']}.jsonl").write_text(json.dumps(row) + "\n")
    dist.barrier()


def run_slot(
    attention: Any, schedule: DynamicCpSchedule, *, slot: Any, size: int, groups: ContextGroups, plan: int
) -> tuple[float, int]:
    """Run one micro-batch's share of this rank: the largest difference of outputs and gradients, and its tokens."""
    from megatron.core.packed_seq_params import PackedSeqParams

    multiple = schedule.topology.at_cp_size(size).token_multiple
    lengths = [int(schedule.lengths[sample]) for sample in slot]
    padded = [-(-length // multiple) * multiple for length in lengths]
    bounds = torch.tensor([0, *padded]).cumsum(0)
    group = groups.of_attention(size)
    held = torch.arange(int(bounds[-1]))
    if group is not None:
        held = partitioned_indices(bounds.tolist(), cp_size=size, cp_rank=group.rank())
    alone = [alone_on_one_rank(sample, length=length, plan=plan) for sample, length in zip(slot, lengths, strict=True)]
    packs = [packed([of_sample[name] for of_sample in alone], padded=padded)[held] for name in range(8)]
    query, key, value = (pack.clone().requires_grad_() for pack in packs[:3])
    starts = bounds.int()
    params = PackedSeqParams(qkv_format="thd", cu_seqlens_q=starts, cu_seqlens_kv=starts)
    params.max_seqlen_q = params.max_seqlen_kv = max(padded)
    params.cp_group, params.local_cp_size = group, size
    output = attention(query, key, value, packed_seq_params=params)
    gradient, wanted = packs[3].flatten(1), packs[4:]
    gradients = torch.autograd.grad(output, (query, key, value), gradient)
    real = packed([torch.ones(length) for length in lengths], padded=padded)[held].bool()
    seen = (output.detach().view(-1, HEADS, CHANNELS), *gradients)
    worst = max(float((a - b)[real].abs().max()) if real.any() else 0.0 for a, b in zip(seen, wanted, strict=True))
    return worst, int(real.sum())


def alone_on_one_rank(sample: int, *, length: int, plan: int) -> list[Tensor]:
    """Query, key, value, gradient of the output; output and gradients of the first three: `[length, heads, ...]`."""
    noise = torch.Generator().manual_seed(plan * 1000 + sample)
    heads = (HEADS, QUERY_GROUPS, QUERY_GROUPS, HEADS)
    query, key, value, gradient = (
        torch.randn(length, n, CHANNELS, dtype=torch.float64, generator=noise).requires_grad_() for n in heads
    )
    batched = (x.transpose(0, 1).unsqueeze(0) for x in (query, key, value))
    output = scaled_dot_product_attention(*batched, is_causal=True, enable_gqa=True).squeeze(0).transpose(0, 1)
    gradients = torch.autograd.grad(output, (query, key, value), gradient)
    return [x.detach() for x in (query, key, value, gradient, output, *gradients)]


def packed(pieces: list[Tensor], *, padded: list[int]) -> Tensor:
    """One after another, each followed by zeros up to its padded length."""
    gaps = [
        torch.cat([piece, piece.new_zeros(width - len(piece), *piece.shape[1:])])
        for piece, width in zip(pieces, padded, strict=True)
    ]
    return torch.cat(gaps)


if __name__ == "__main__":
    main()
