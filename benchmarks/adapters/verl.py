"""verl with and without its adapter, in planned work, where verl is installed.

Ranks meet after each mini-batch: the sum of the costliest rank of each, over the mean. Micro-batches: how many, under a
token cap. Work is FLOPs of Qwen3-8B throughout: what verl plans by its own formula is counted by the model too. verl's
side is its own code, called as its trainer does.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace

import numpy as np
from numpy.typing import NDArray

# verl asks for a platform; the one for the CPU is in .ci/upstream.
os.environ |= {"VERL_PLATFORM": "cpu", "VERL_USE_EXTERNAL_MODULES": "verl_cpu_platform"}
sys.path.append(str(Path(__file__).parents[2] / ".ci" / "upstream"))

import torch
from tensordict import TensorDict
from verl.protocol import DataProto
from verl.trainer.ppo.ray_trainer import RayPPOTrainer
from verl.utils import seqlen_balancing

from megatron_balance.adapters.kit import sample_costs
from megatron_balance.adapters.verl import choose_cost, install

MODEL = "Qwen3-8B"
DP_SIZE = 8
MINIBATCH_ROWS = 128
CAP = 40960

Lengths = NDArray[np.int64]
Order = Callable[..., NDArray[np.int64]]


def rollout_lengths(seed: int, *, num_rows: int) -> Lengths:
    """`[num_rows]` tokens: lognormal(7.5, 1.2) from 64 to 32768."""
    draws = np.random.default_rng(seed).lognormal(7.5, 1.2, num_rows)
    return np.clip(draws, 64, 32768).astype(np.int64)


def trainer() -> SimpleNamespace:
    """A trainer with the attributes that `RayPPOTrainer._balance_batch` reads."""
    actor = SimpleNamespace(ppo_mini_batch_size=MINIBATCH_ROWS, get=lambda _: MINIBATCH_ROWS)
    role = SimpleNamespace(actor=actor, rollout=SimpleNamespace(n=1))
    group = SimpleNamespace(_dispatch_info={"actor": list(range(DP_SIZE))})
    return SimpleNamespace(
        config=SimpleNamespace(actor_rollout_ref=role),
        use_critic=False,
        actor_rollout_wg=group,
        _get_dp_size=lambda *_: DP_SIZE,
    )


def ordered_rows(lengths: Lengths, *, keep_minibatch: bool) -> NDArray[np.int64]:
    """Rows as `_balance_batch` puts them: `[dp_size, num_minibatches, rows]`."""
    mask = (torch.arange(int(lengths.max())) < torch.from_numpy(lengths)[:, None]).to(torch.int8)
    batch = DataProto.from_dict({"row": torch.arange(len(lengths)), "attention_mask": mask})
    RayPPOTrainer._balance_batch(trainer(), batch, {}, keep_minibatch=keep_minibatch)
    return batch.batch["row"].numpy().reshape(DP_SIZE, -1, MINIBATCH_ROWS // DP_SIZE)


def as_loaded(lengths: Lengths, *, keep_minibatch: bool) -> NDArray[np.int64]:
    return np.arange(len(lengths)).reshape(DP_SIZE, -1, MINIBATCH_ROWS // DP_SIZE)


def measure(args: argparse.Namespace) -> dict[str, list[float | None]]:
    """Way → its figures, in the order of `COLUMNS`."""
    figures = {
        "as loaded": _figures(as_loaded, seeds=args.seeds),
        "verl": _figures(ordered_rows, seeds=args.seeds),
        "verl, keep_minibatch": _figures(ordered_rows, seeds=args.seeds, keep_minibatch=True),
    }
    figures["verl"][2] = num_micro_batches(seeds=args.seeds)
    install(model=MODEL)
    figures["adapter"] = _figures(ordered_rows, seeds=args.seeds)
    figures["adapter"][2] = num_micro_batches(seeds=args.seeds)
    return figures


def _figures(order: Order, *, seeds: int, keep_minibatch: bool = False) -> list[float | None]:
    """Of one order of rows, without the number of micro-batches; where it keeps mini-batches, of several alone."""
    batches = [rollout_lengths(seed, num_rows=512) for seed in range(seeds)]
    several = _mean_imbalance(order, batches, keep_minibatch=keep_minibatch)
    if keep_minibatch:
        return [None, several, None]
    batches = [rollout_lengths(seed, num_rows=128) for seed in range(seeds)]
    return [_mean_imbalance(order, batches), several, None]


def _mean_imbalance(order: Order, batches: Sequence[Lengths], *, keep_minibatch: bool = False) -> float:
    """Sum over mini-batches of the costliest rank's work, over that of the mean rank."""
    ratios: list[float] = []
    for lengths in batches:
        work = sample_costs(lengths, cost_model=choose_cost(MODEL))
        loads = work[order(lengths, keep_minibatch=keep_minibatch)].sum(axis=2)
        ratios.append(float(loads.max(axis=0).sum() / loads.mean(axis=0).sum()))
    return float(np.mean(ratios))


def num_micro_batches(*, seeds: int) -> float:
    """Mean number of micro-batches of 64 rollout rows on one rank under CAP tokens."""
    counts: list[int] = []
    for seed in range(seeds):
        lengths = rollout_lengths(seed, num_rows=64)
        ids = [torch.zeros(int(length), dtype=torch.int8) for length in lengths]
        nested = torch.nested.as_nested_tensor(ids, layout=torch.jagged)
        batch = TensorDict({"input_ids": nested}, batch_size=[len(lengths)])
        parts, rows = seqlen_balancing.rearrange_micro_batches(batch, max_token_len=CAP)
        assert max(int(lengths[part].sum()) for part in rows) <= CAP
        counts.append(len(parts))
    return float(np.mean(counts))


COLUMNS = ["128 rows, one step", "512 rows, 4 mini-batches", "micro-batches of 64 rows"]
SAYS = "Costliest rank over the mean rank, summed over mini-batches; lognormal(7.5, 1.2), 8 ranks; cap 40960 tokens."
