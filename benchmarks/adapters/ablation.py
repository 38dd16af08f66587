"""R41, R42: what the cost by which a batch is planned is worth, on the four setups of slime's pull request 2017.

Karmarkar-Karp by tokens is the request's baseline; by `coeff * L + L**2` its first form of `--balance-by-flops`, with
its coefficient; by FLOPs its last. Plans are judged by FLOPs at full size, on all real sets of lengths.
"""

from __future__ import annotations

import argparse

import numpy as np
from numpy.typing import NDArray

from benchmarks.planner.setups import LENGTHS, SETUPS, Setup, global_batches
from benchmarks.rates import slime_approximate
from megatron_balance import CostModel, DataSchedule, ModelShape
from megatron_balance.planner import build_data_schedule

COLUMNS = ["cost", "of the worst batch"]
SAYS = (
    "Cost by FLOPs over that of ranks that never wait: mean over real lengths at full size, and of the batch "
    "that tokens balance worst."
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
    shape = ModelShape.preset(setup.model)
    rows: dict[str, list[float]] = {}
    worst = 0
    for name, (cost, algorithm) in WAYS.items():
        model = _cost(cost, shape, judge=setup.cost_model)
        ratios = [_over_bound(setup, batch, _plan(setup, batch, model, algorithm)) for batch in batches]
        worst = worst if rows else int(np.argmax(ratios))
        rows[name] = [float(np.mean(ratios)), ratios[worst]]
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
