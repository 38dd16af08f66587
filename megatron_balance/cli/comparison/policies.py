"""Plans global batches under each policy, judged by one cost model.

stock          sample i goes to rank i % dp_size, one sample a micro-batch: Megatron's own sampler
packed         every rank packs the samples it loaded, first fit, up to the token cap
balance-data   samples move; ranks are made even in tokens, first fit
by-flops       samples move; ranks are made even in FLOPs, by the chosen algorithm
calibrated     as by-flops, in the seconds of --cost seconds.json
dynamic CP     the last of these, with dynamic context-parallel sizes

Invariant: one cost model judges all policies; each is planned with the cost that its flags select in training.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, replace

from megatron_balance.cli.comparison.batches import GlobalBatch
from megatron_balance.cost.model import CostModel
from megatron_balance.planner import ScheduleMetrics, build_data_schedule, schedule_metrics
from megatron_balance.record.judging import assigned_step, step_metrics, stock_slots
from megatron_balance.record.run_record import RunInfo
from megatron_balance.record.step import StepRecord


@dataclass(frozen=True)
class Policy:
    """One way to divide a global batch among ranks and micro-batches.

    Attributes:
        name: for tables.
        flags: training flags that select it; empty for stock.
        cost_model: cost that it evens out; None for stock, which does not pack.
        algorithm: packing algorithm.
        move_samples: samples may leave the rank that loaded them.
        dynamic_cp: each micro-batch has a context-parallel size of its own.
    """

    name: str
    _: KW_ONLY
    flags: str
    cost_model: CostModel | None
    algorithm: str = "auto"
    move_samples: bool = True
    dynamic_cp: bool = False


@dataclass(frozen=True, eq=False)
class PolicyResult:
    """All global batches under one policy.

    Attributes:
        policy: the policy.
        steps: `[num_steps]` its plans.
        metrics: `[num_steps]` their figures, by the cost model that judges every policy.
        setting: ranks and cost that the plans are judged by; with dynamic CP ranks are leaves.
        free_costs: `[num_steps]` predicted times with free communication; empty if none is counted.
    """

    policy: Policy
    steps: tuple[StepRecord, ...]
    metrics: tuple[ScheduleMetrics, ...]
    setting: RunInfo
    free_costs: tuple[int, ...] = ()

    @property
    def predicted_cost(self) -> int:
        """Predicted time of all steps, in units of the cost model."""
        return sum(step.predicted_cost for step in self.metrics)

    def mean(self, figure: Callable[[ScheduleMetrics], float]) -> float:
        """Mean of a figure over the steps."""
        return math.fsum(map(figure, self.metrics)) / len(self.metrics)

    @property
    def mean_plan_seconds(self) -> float:
        """Mean time to plan a step."""
        return sum(step.plan_seconds for step in self.steps) / len(self.steps)


STOCK = Policy("stock", flags="", cost_model=None)
"""Megatron's own sampler, one sample a micro-batch."""


def token_policies(*, max_tokens_per_gpu: int | None) -> list[Policy]:
    """The policies that count tokens only; their flags name `max_tokens_per_gpu`."""
    pack = f"--use-dynamic-batch-size --max-tokens-per-gpu {max_tokens_per_gpu}"
    tokens = CostModel.tokens()
    return [
        STOCK,
        Policy("packed", flags=pack, cost_model=tokens, move_samples=False),
        Policy("balance-data", flags=f"{pack} --balance-data", cost_model=tokens),
    ]


def plan_policy(
    policy: Policy,
    batches: Sequence[GlobalBatch],
    *,
    setting: RunInfo,
    free: CostModel | None = None,
    after_step: Callable[[], None] = lambda: None,
) -> PolicyResult:
    """Plan every global batch under a policy.

    Args:
        policy: the policy.
        batches: `[num_steps]`, in the order of training.
        setting: ranks, limits, objective and the cost that judges.
        free: that cost without communication; None, or the same cost, if it has none.
        after_step: called after each step.
    """
    plan = _stock if policy.cost_model is None else _planned
    steps: list[StepRecord] = []
    metrics: list[ScheduleMetrics] = []
    free_costs: list[int] = []
    for index, batch in enumerate(batches, start=1):
        step, judge = plan(batch, policy, setting=setting, iteration=index)
        steps.append(step)
        metrics.append(judge(setting.cost_model))
        if free is not None and free != setting.cost_model and not policy.dynamic_cp:
            free_costs.append(judge(free).predicted_cost)
        after_step()
    return PolicyResult(policy, tuple(steps), tuple(metrics), setting, tuple(free_costs))


_Planned = tuple[StepRecord, Callable[[CostModel], ScheduleMetrics]]
"""A planned step, and its figures by a cost model."""


def _planned(batch: GlobalBatch, policy: Policy, *, setting: RunInfo, iteration: int) -> _Planned:
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
    step = StepRecord.of_schedule(schedule, iteration=iteration, plan_seconds=time.perf_counter() - started)
    return step, lambda cost_model: schedule_metrics(schedule, cost_model=cost_model)


def _stock(batch: GlobalBatch, _: Policy, *, setting: RunInfo, iteration: int) -> _Planned:
    homes = batch.home_ranks(setting.topology.dp_size)
    slot_of, num_microbatches = stock_slots(homes, info=setting)
    step = assigned_step(
        slot_of,
        iteration=iteration,
        num_microbatches=num_microbatches,
        segment_lengths=batch.segment_lengths,
        num_segments=batch.segments_of_samples,
        home_ranks=homes,
        cost_model=setting.cost_model,
        info=setting,
    )

    return step, lambda cost_model: step_metrics(replace(step, cost_model=cost_model), info=setting)
