"""verl with and without its adapter, in planned work, where verl is installed.

Ranks meet after each mini-batch: the sum of the costliest rank of each, over the mean. Micro-batches: how many, under a
token cap. Work is FLOPs of Qwen3-8B throughout: what verl plans by its own formula is counted by the model too. verl's
side is its own code, called as its trainer does.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
from numpy.typing import NDArray

# verl asks for a platform; the one for the CPU is in scripts/upstream.
os.environ |= {"VERL_PLATFORM": "cpu", "VERL_USE_EXTERNAL_MODULES": "verl_cpu_platform"}
sys.path.append(str(Path(__file__).parents[2] / "scripts" / "upstream"))

import torch
from tensordict import TensorDict
from verl.protocol import DataProto
from verl.trainer.ppo.ray_trainer import RayPPOTrainer
from verl.utils import seqlen_balancing

from benchmarks.adapters.trained import step_of
from megatron_balance.adapters.kit import sample_costs
from megatron_balance.adapters.verl import choose_cost, install

MODEL = "Qwen3-8B"
DP_SIZE = 8
CAP = 40960

Lengths = NDArray[np.int64]


def rollout_lengths(seed: int, *, num_rows: int) -> Lengths:
    """`[num_rows]` tokens: lognormal(7.5, 1.2) from 64 to 32768."""
    draws = np.random.default_rng(seed).lognormal(7.5, 1.2, num_rows)
    return np.clip(draws, 64, 32768).astype(np.int64)


def trainer_of(*, minibatch_rows: int) -> SimpleNamespace:
    """A trainer with the attributes that `RayPPOTrainer._balance_batch` reads."""
    actor = SimpleNamespace(ppo_mini_batch_size=minibatch_rows, get=lambda _: minibatch_rows)
    role = SimpleNamespace(actor=actor, rollout=SimpleNamespace(n=1))
    group = SimpleNamespace(_dispatch_info={"actor": list(range(DP_SIZE))})
    return SimpleNamespace(
        config=SimpleNamespace(actor_rollout_ref=role),
        use_critic=False,
        actor_rollout_wg=group,
        _get_dp_size=lambda *_: DP_SIZE,
    )


def ordered_rows(lengths: Lengths, *, minibatch_rows: int, keep_minibatch: bool) -> NDArray[np.int64]:
    """Rows as `_balance_batch` puts them: `[dp_size, num_minibatches, rows]`."""
    mask = (torch.arange(int(lengths.max())) < torch.from_numpy(lengths)[:, None]).to(torch.int8)
    batch = DataProto.from_dict({"row": torch.arange(len(lengths)), "attention_mask": mask})
    RayPPOTrainer._balance_batch(trainer_of(minibatch_rows=minibatch_rows), batch, {}, keep_minibatch=keep_minibatch)
    return batch.batch["row"].numpy().reshape(DP_SIZE, -1, minibatch_rows // DP_SIZE)


def as_loaded(lengths: Lengths, *, minibatch_rows: int, keep_minibatch: bool) -> NDArray[np.int64]:
    """Rows in the order in which they came."""
    return np.arange(len(lengths)).reshape(DP_SIZE, -1, minibatch_rows // DP_SIZE)


def imbalance(rows: NDArray[np.int64], *, work: NDArray[np.int64]) -> float:
    """Sum over mini-batches of the costliest rank's work, over that of the mean rank."""
    loads = work[rows].sum(axis=2)
    return float(loads.max(axis=0).sum() / loads.mean(axis=0).sum())


def measure(args: argparse.Namespace) -> dict[str, list[float | None]]:
    """Way → its figures, in the order of `COLUMNS`."""
    ways = {
        "as loaded": (as_loaded, False, False),
        "verl": (ordered_rows, False, False),
        "verl, keep_minibatch": (ordered_rows, False, True),
        "adapter": (ordered_rows, True, False),
    }
    seeds, found = args.seeds, dict[str, list[float | None]]()
    for name, (order, balanced, keep_minibatch) in ways.items():
        figures: list[float | None] = []
        first = None
        for num_rows, minibatch_rows in ((128, 128), (512, 128)):
            if keep_minibatch and num_rows == minibatch_rows:
                figures.append(None)  # there is one mini-batch to keep
                continue
            arguments = {"minibatch_rows": minibatch_rows, "keep_minibatch": keep_minibatch}
            ratios = []
            for seed in range(seeds):
                lengths = rollout_lengths(seed, num_rows=num_rows)
                with _planned(balanced):
                    rows = order(lengths, **arguments)
                first = lengths[rows].tolist() if first is None and num_rows == minibatch_rows else first
                ratios.append(imbalance(rows, work=sample_costs(lengths, cost_model=choose_cost(MODEL))))
            figures.append(float(np.mean(ratios)))
        is_packed = name in ("verl", "adapter")
        step = [None, None] if first is None else step_of(first, together=True)
        found[name] = [*figures, num_micro_batches(balanced, seeds=seeds) if is_packed else None, *step]
    return found


@contextlib.contextmanager
def _planned(balanced: bool) -> Iterator[None]:
    adapter = install(model=MODEL) if balanced else None
    try:
        yield
    finally:
        if adapter is not None:
            adapter.undo()


def num_micro_batches(balanced: bool, *, seeds: int) -> float:
    """Mean number of micro-batches of 64 rollout rows on one rank under CAP tokens."""
    counts: list[int] = []
    for seed in range(seeds):
        lengths = rollout_lengths(seed, num_rows=64)
        ids = [torch.zeros(int(length), dtype=torch.int8) for length in lengths]
        nested = torch.nested.as_nested_tensor(ids, layout=torch.jagged)
        batch = TensorDict({"input_ids": nested}, batch_size=[len(lengths)])
        with _planned(balanced):
            parts, rows = seqlen_balancing.rearrange_micro_batches(batch, max_token_len=CAP)
        assert max(int(lengths[part].sum()) for part in rows) <= CAP
        counts.append(len(parts))
    return float(np.mean(counts))


COLUMNS = ["128 rows, one step", "512 rows, 4 mini-batches", "micro-batches of 64 rows", "CPU s", "over the mean"]
SAYS = (
    "Costliest rank over the mean rank, summed over mini-batches; lognormal(7.5, 1.2), 8 ranks; cap 40960 tokens. CPU "
    "seconds of a step of 128 rows."
)
