"""Ways to deal out global batches, planned and judged alike.

stock          sample i goes to rank i % dp_size, one sample a micro-batch: Megatron's own sampler
packed         every rank packs what it loaded, first fit, up to the token cap
balance-data   samples move; ranks are made even in tokens, first fit
by-flops       samples move; ranks are made even in FLOPs, by the chosen algorithm
calibrated     the same in seconds of a calibration
look-ahead     the same, and each step's samples are chosen from several global batches

Invariant: one cost model judges all of them; each is made with what its flags know.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import cached_property

import numpy as np

from megatron_balance.cli.comparison.batches import GlobalBatch, look_ahead
from megatron_balance.cost.model import CostModel
from megatron_balance.planner.build import build_data_schedule
from megatron_balance.planner.metrics import ScheduleMetrics, assignment_metrics, schedule_metrics
from megatron_balance.planner.schedule import DataSchedule, Ranks
from megatron_balance.topology import Limits, Topology


@dataclass(frozen=True)
class Setting:
    """What all policies are given alike.

    Attributes:
        cost_model: what a sample costs; it judges every policy.
        cost_name: `tokens`, `flops` or `seconds`.
        topology: the ranks.
        limits: what a micro-batch holds.
        objective: when ranks wait for one another, resolved.
    """

    cost_model: CostModel
    cost_name: str
    topology: Topology
    limits: Limits
    objective: str


@dataclass(frozen=True)
class Policy:
    """One way to deal out a global batch.

    Attributes:
        name: for tables.
        flags: what asks for it in training; empty for stock.
        cost_model: what it makes ranks even in; None for stock, which does not pack.
        algorithm: how it packs.
        move_samples: whether samples leave the rank that loaded them.
        lookahead: global batches that a step's samples are chosen from.
    """

    name: str
    _: KW_ONLY
    flags: str
    cost_model: CostModel | None
    algorithm: str = "auto"
    move_samples: bool = True
    lookahead: int = 1


@dataclass(frozen=True, eq=False)
class PlannedStep:
    """One global batch under one policy.

    Attributes:
        batch: its samples.
        metrics: its figures, judged by the setting's cost model.
        plan_seconds: time to plan it.
        plan: the schedule, or where there is none, as under stock, the ranks themselves.
    """

    batch: GlobalBatch
    _: KW_ONLY
    metrics: ScheduleMetrics
    plan_seconds: float
    plan: DataSchedule | Ranks

    @cached_property
    def ranks(self) -> Ranks:
        """`ranks[dp_rank][slot]` are sample ids of the batch."""
        return self.plan.ranks if isinstance(self.plan, DataSchedule) else self.plan


@dataclass(frozen=True, eq=False)
class PolicyResult:
    """All global batches under one policy.

    Attributes:
        policy: which.
        steps: `[num_steps]`.
    """

    policy: Policy
    steps: tuple[PlannedStep, ...]

    @property
    def predicted_cost(self) -> int:
        """Predicted time of all steps, in units of the cost model."""
        return sum(step.metrics.predicted_cost for step in self.steps)

    def mean(self, figure: Callable[[ScheduleMetrics], float]) -> float:
        """Mean of a figure over the steps."""
        return math.fsum(figure(step.metrics) for step in self.steps) / len(self.steps)


STOCK = Policy("stock", flags="", cost_model=None)
"""Megatron's own sampler, one sample a micro-batch."""


def token_policies(*, max_tokens_per_gpu: int | None) -> list[Policy]:
    """The policies that count tokens alone. `max_tokens_per_gpu` is for their flags."""
    pack = f"--use-dynamic-batch-size --max-tokens-per-gpu {max_tokens_per_gpu}"
    tokens = CostModel.tokens()
    return [
        STOCK,
        Policy("packed", flags=pack, cost_model=tokens, algorithm="first_fit", move_samples=False),
        Policy("balance-data", flags=f"{pack} --balance-data", cost_model=tokens, algorithm="first_fit"),
    ]


def plan_policy(
    policy: Policy,
    batches: Sequence[GlobalBatch],
    *,
    setting: Setting,
    after_step: Callable[[], None] = lambda: None,
) -> PolicyResult:
    """Plan every global batch under a policy.

    Args:
        policy: how.
        batches: `[num_steps]`, in the order of training.
        setting: ranks, limits and the cost that judges.
        after_step: called after each.
    """
    if policy.lookahead > 1:
        assert policy.cost_model is not None, "stock does not look ahead"
        batches = look_ahead(batches, window=policy.lookahead, cost_model=policy.cost_model, topology=setting.topology)
    steps: list[PlannedStep] = []
    for batch in batches:
        steps.append(_stock(batch, setting) if policy.cost_model is None else _planned(batch, policy, setting))
        after_step()
    return PolicyResult(policy, tuple(steps))


def _planned(batch: GlobalBatch, policy: Policy, setting: Setting) -> PlannedStep:
    assert policy.cost_model is not None, "stock has no cost"
    started = time.perf_counter()
    schedule = build_data_schedule(
        batch.segment_lengths,
        num_segments=batch.num_segments,
        cost_model=policy.cost_model,
        topology=setting.topology,
        limits=setting.limits,
        objective=setting.objective,
        algorithm=policy.algorithm,
        home_ranks=batch.home_ranks(setting.topology.dp_size),
        move_samples=policy.move_samples,
    )
    plan_seconds = time.perf_counter() - started
    metrics = schedule_metrics(schedule, cost_model=setting.cost_model)
    return PlannedStep(batch, metrics=metrics, plan_seconds=plan_seconds, plan=schedule)


def _stock(batch: GlobalBatch, setting: Setting) -> PlannedStep:
    started = time.perf_counter()
    dp_size = setting.topology.dp_size
    homes = batch.home_ranks(dp_size)
    ranks = tuple(tuple((sample,) for sample in np.flatnonzero(homes == rank).tolist()) for rank in range(dp_size))
    plan_seconds = time.perf_counter() - started
    metrics = assignment_metrics(
        ranks,
        lengths=batch.segment_lengths,
        num_segments=batch.num_segments,
        cost_model=setting.cost_model,
        topology=setting.topology,
        limits=setting.limits,
        objective=setting.objective,
        home_ranks=homes,
    )
    return PlannedStep(batch, metrics=metrics, plan_seconds=plan_seconds, plan=ranks)
