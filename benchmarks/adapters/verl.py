"""verl with and without its adapter, in planned work: `python -m benchmarks.adapters.verl`, where verl is installed.

    ranks          the whole batch is one optimiser step: the costliest rank over the mean of all
    mini-batches   ranks meet after each of four: the sum of the costliest rank of each, over the mean
    micro-batches  under a token cap: how many, on average, and over the cap

Work is FLOPs of Qwen3-8B throughout: what verl plans by its own formula is counted by the model too. verl's side is its
own code, called as its trainer does.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
from numpy.typing import NDArray

os.environ.setdefault("VERL_PLATFORM", "cpu")

import torch
from tensordict import TensorDict
from verl.protocol import DataProto
from verl.trainer.ppo.ray_trainer import RayPPOTrainer
from verl.utils import seqlen_balancing

from megatron_balance.adapters.verl import install
from megatron_balance.adapters.verl.workload import choose_workload, workloads

MODEL = "Qwen3-8B"
DP_SIZE = 8
MINIBATCHES = 4

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
        config=SimpleNamespace(actor_rollout_ref=role), actor_rollout_wg=group, _get_dp_size=lambda *_: DP_SIZE
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


def floor(rows: NDArray[np.int64], *, work: NDArray[np.int64]) -> float:
    """The same for what no assignment of equal counts beats: the longest row of a mini-batch with its lightest ones."""
    total = least = 0.0
    for minibatch in rows.swapaxes(0, 1):
        costs = np.sort(work[minibatch], axis=None)
        total += costs.sum() / DP_SIZE
        least += max(costs.sum() / DP_SIZE, costs[-1] + costs[: minibatch.shape[1] - 1].sum())
    return least / total


def print_imbalance(title: str, *, num_rows: int, minibatch_rows: int, seeds: int) -> None:
    """One table: means over seeds."""
    cost_model = choose_workload(MODEL)
    ways: list[tuple[str, Callable[..., NDArray[np.int64]], bool, bool]] = [
        ("as loaded", as_loaded, False, False),
        ("verl", ordered_rows, False, False),
        ("verl, keep_minibatch", ordered_rows, False, True),
        ("adapter", ordered_rows, True, False),
    ]
    if minibatch_rows == num_rows:
        del ways[2]  # there is one mini-batch to keep
    print(f"\n{title}")
    for name, order, balanced, keep_minibatch in ways:
        found, least = [], []
        for seed in range(seeds):
            lengths = rollout_lengths(seed, num_rows=num_rows)
            work = workloads(lengths, cost_model=cost_model)
            adapter = install(MODEL) if balanced else None
            rows = order(lengths, minibatch_rows=minibatch_rows, keep_minibatch=keep_minibatch)
            if adapter is not None:
                adapter.undo()
            found.append(imbalance(rows, work=work))
            least.append(floor(rows, work=work))
        print(f"  {name:22} {np.mean(found):7.4f}   over its own floor {np.mean(np.array(found) / least):7.4f}")


def print_micro_batches(*, seeds: int) -> None:
    """Counts on one rank: 25 rows of 50 to 89 tokens under 300, and 64 rollout rows under 40960."""
    print("\nmicro-batches on one rank: mean number, and sets that need no more than their tokens ask for")
    draws = {
        "25 rows, cap 300": (lambda seed: np.random.default_rng(seed).integers(50, 90, 25), 300),
        "64 rollout rows, cap 40960": (lambda seed: rollout_lengths(seed, num_rows=64), 40960),
    }
    for title, (draw, cap) in draws.items():
        for name, balanced in (("verl", False), ("adapter", True)):
            counts, tight = [], 0
            for seed in range(seeds):
                lengths = draw(seed)
                ids = torch.nested.as_nested_tensor(
                    [torch.zeros(int(length), dtype=torch.int8) for length in lengths], layout=torch.jagged
                )
                adapter = install(MODEL) if balanced else None
                batch = TensorDict({"input_ids": ids}, batch_size=[len(lengths)])
                parts, rows = seqlen_balancing.rearrange_micro_batches(batch, max_token_len=cap)
                if adapter is not None:
                    adapter.undo()
                assert max(int(lengths[part].sum()) for part in rows) <= cap
                counts.append(len(parts))
                tight += len(parts) == -(-int(lengths.sum()) // cap)
            print(f"  {title:28} {name:8} {np.mean(counts):7.3f}   {tight} of {seeds}")


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=50, help="batches to average over")
    seeds = parser.parse_args().seeds
    print_imbalance(f"128 rows over {DP_SIZE} ranks, one step", num_rows=128, minibatch_rows=128, seeds=seeds)
    title = f"512 rows over {DP_SIZE} ranks, {MINIBATCHES} mini-batches"
    print_imbalance(title, num_rows=512, minibatch_rows=512 // MINIBATCHES, seeds=seeds)
    print_micro_batches(seeds=seeds)


if __name__ == "__main__":
    main()
