"""R41, R42: what the cost by which a batch is planned is worth, on the four setups of slime's pull request 2017.

Karmarkar-Karp by tokens is the request's baseline; by `coeff * L + L**2` its first form of `--balance-by-flops`, with
its coefficient; by FLOPs its last. Plans are judged by FLOPs at full size, on all real sets of lengths, and trained at
a small one (`trained.py`), on the batch that tokens balance worst, whose gradient must be the same by every plan.
"""

from __future__ import annotations

import argparse
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from benchmarks.adapters.trained import SCALE, difference, small_length, small_shape, train
from benchmarks.planner.setups import LENGTHS, SETUPS, Setup, global_batches
from benchmarks.rates import slime_approximate
from megatron_balance import CostModel, DataSchedule, ModelShape
from megatron_balance.planner import build_data_schedule

COLUMNS = ["cost", "of the worst batch", "CPU s", "over the mean", "gradient"]
SAYS = (
    "Cost by FLOPs over that of ranks that never wait: mean over real lengths at full size, and of the batch "
    "that tokens balance worst; of that CPU seconds of a step at an eighth of width and lengths, also over the "
    "mean rank's, and how far its gradient is from that of the first plan."
)
WAYS = {
    "tokens, karmarkar_karp": ("tokens", "karmarkar_karp"),
    "coeff·L + L², karmarkar_karp": ("approximate", "karmarkar_karp"),
    "FLOPs, karmarkar_karp": ("flops", "karmarkar_karp"),
    "FLOPs, default": ("flops", "auto"),
}


def measure(args: argparse.Namespace) -> dict[str, list[float]]:
    """Setup and way → its figures, in the order of `COLUMNS`."""
    return {f"{setup.name}: {way}": row for setup in SETUPS[:4] for way, row in _rows(setup).items()}


def _rows(setup: Setup) -> dict[str, list[float]]:
    folder = LENGTHS if LENGTHS.is_dir() else None
    batches = list(global_batches(setup, lengths_folder=folder))
    shape, is_moe = ModelShape.preset(setup.model), setup.topology.ep_size > 1
    small = small_shape(is_moe=is_moe)
    rows: dict[str, list[float]] = {}
    worst, reference = 0, None
    for name, (cost, algorithm) in WAYS.items():
        model = _cost(cost, shape, judge=setup.cost_model)
        ratios = [_over_bound(setup, batch, _plan(setup, batch, model, algorithm)) for batch in batches]
        worst = worst if rows else int(np.argmax(ratios))
        lengths = np.array([small_length(length) for length in batches[worst].tolist()])
        small_setup = replace(setup, max_tokens_per_gpu=setup.max_tokens_per_gpu // SCALE)
        plan = _plan(small_setup, lengths, _cost(cost, small, judge=CostModel.from_shape(small)), algorithm)
        step = train([[lengths[list(slot)].tolist() for slot in slots] for slots in plan.ranks], is_moe=is_moe)
        reference = step.gradient if reference is None else reference
        figures = step.figures(together=setup.objective == "microbatch")
        rows[name] = [float(np.mean(ratios)), ratios[worst], *figures, difference(step.gradient, reference)]
    return rows


def _cost(name: str, shape: ModelShape, *, judge: CostModel) -> CostModel:
    if name == "tokens":
        return CostModel.tokens()
    return slime_approximate(shape) if name == "approximate" else judge


def _plan(setup: Setup, batch: NDArray[np.int64], cost: CostModel, algorithm: str) -> DataSchedule:
    return build_data_schedule(
        batch,
        cost_model=cost,
        topology=setup.topology,
        limits=setup.limits,
        objective=setup.objective,
        algorithm=algorithm,
    )


def _over_bound(setup: Setup, batch: NDArray[np.int64], plan: DataSchedule) -> float:
    """Of the ranks' FLOPs, waiting as the setup's ranks do."""
    costs = setup.cost_model.sample_costs(setup.topology.padded_seq_len(batch)).costs[0]
    grid = np.array([[costs[list(slot)].sum() for slot in slots] for slots in plan.ranks], dtype=np.float64)
    step = grid.max(axis=0).sum() if setup.objective == "microbatch" else grid.sum(axis=1).max()
    return float(step / (costs.sum() / len(grid)))
