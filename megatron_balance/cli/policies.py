"""Four ways to deal out a global batch, planned and judged alike.

stock        sample i goes to rank i % dp_size, one sample a micro-batch: Megatron's own sampler
packed       every rank packs what it loaded, first fit, up to the token cap
by tokens    samples move; ranks are made even in tokens, first fit
balanced     samples move; ranks are made even in the chosen cost, by the chosen algorithm
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron_balance.planner.cost import CostModel
from megatron_balance.planner.metrics import ScheduleMetrics, assignment_metrics
from megatron_balance.planner.schedule import DataSchedule, Ranks, build_data_schedule
from megatron_balance.planner.topology import Limits, Topology


@dataclass(frozen=True)
class Setting:
    """What all policies are given alike.

    Attributes:
        cost_model: what a sample costs; it judges every policy.
        cost_name: `tokens` or `flops`.
        topology: the ranks.
        limits: what a micro-batch holds.
        objective: when ranks wait for one another.
        algorithm: how the last policy packs.
    """

    cost_model: CostModel
    cost_name: str
    topology: Topology
    limits: Limits
    objective: str
    algorithm: str


@dataclass(frozen=True)
class PlannedStep:
    """One global batch under one policy.

    Attributes:
        ranks: `ranks[dp_rank][slot]` are sample ids of the batch.
        metrics: its figures, judged by the setting's cost model.
        plan_seconds: time to plan it.
    """

    ranks: Ranks
    metrics: ScheduleMetrics
    plan_seconds: float


@dataclass(frozen=True)
class PolicyResult:
    """All global batches under one policy.

    Attributes:
        label: name of the policy, with the flags that ask for it.
        steps: `[num_steps]`.
    """

    label: str
    steps: tuple[PlannedStep, ...]

    @property
    def predicted_cost(self) -> int:
        """Predicted time of all steps, in units of the cost model."""
        return sum(step.metrics.predicted_cost for step in self.steps)


_Planner = Callable[[NDArray[np.int64], Setting], Ranks]


def compare_policies(batches: Sequence[NDArray[np.int64]], *, setting: Setting) -> list[PolicyResult]:
    """Plan every global batch under every policy.

    Args:
        batches: `[num_steps]` arrays `[global_batch_size]` of original tokens, in the order of the sampler.
        setting: ranks, limits and cost.

    Returns:
        One result a policy; the last one is the balanced plan.
    """
    planners = {
        "stock sampler, one sample a micro-batch": _stock,
        "packed (--use-dynamic-batch-size)": _packed,
        "tokens, first fit (--balance-data)": _by_tokens,
        _balanced_label(setting): _balanced,
    }
    return [
        PolicyResult(label, tuple(_planned(batch, planner=planner, setting=setting) for batch in batches))
        for label, planner in planners.items()
    ]


def _balanced_label(setting: Setting) -> str:
    algorithm = "" if setting.algorithm == "auto" else f", {setting.algorithm}"
    if setting.cost_name == "flops":
        return f"FLOPs{algorithm} (--balance-data --balance-by-flops)"
    return f"tokens{algorithm or ', level packing'} (--balance-data)"


def _planned(batch: NDArray[np.int64], *, planner: _Planner, setting: Setting) -> PlannedStep:
    started = time.perf_counter()
    ranks = planner(batch, setting)
    plan_seconds = time.perf_counter() - started
    metrics = assignment_metrics(
        ranks,
        lengths=batch,
        cost_model=setting.cost_model,
        topology=setting.topology,
        limits=setting.limits,
        objective=setting.objective,
        home_ranks=_home_ranks(batch, setting),
    )
    return PlannedStep(ranks, metrics, plan_seconds)


def _home_ranks(batch: NDArray[np.int64], setting: Setting) -> NDArray[np.int64]:
    """The rank that Megatron's sampler gives each sample to. `[global_batch_size]`."""
    return np.arange(batch.size, dtype=np.int64) % setting.topology.dp_size


def _stock(batch: NDArray[np.int64], setting: Setting) -> Ranks:
    dp_size = setting.topology.dp_size
    return tuple(tuple((sample,) for sample in range(rank, batch.size, dp_size)) for rank in range(dp_size))


def _packed(batch: NDArray[np.int64], setting: Setting) -> Ranks:
    return _schedule(batch, setting, cost_model=setting.cost_model, algorithm="first_fit", move_samples=False).ranks


def _by_tokens(batch: NDArray[np.int64], setting: Setting) -> Ranks:
    return _schedule(batch, setting, cost_model=CostModel.tokens(), algorithm="first_fit", move_samples=True).ranks


def _balanced(batch: NDArray[np.int64], setting: Setting) -> Ranks:
    return _schedule(
        batch, setting, cost_model=setting.cost_model, algorithm=setting.algorithm, move_samples=True
    ).ranks


def _schedule(
    batch: NDArray[np.int64], setting: Setting, *, cost_model: CostModel, algorithm: str, move_samples: bool
) -> DataSchedule:
    return build_data_schedule(
        batch,
        cost_model=cost_model,
        topology=setting.topology,
        limits=setting.limits,
        objective=setting.objective,
        algorithm=algorithm,
        home_ranks=_home_ranks(batch, setting),
        move_samples=move_samples,
    )
