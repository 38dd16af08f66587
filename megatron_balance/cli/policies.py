"""Plans the same global batches under each policy, and judges all of them by one cost model.

stock          sample i goes to rank i % dp_size, one sample a micro-batch: Megatron's own sampler
packed         every rank packs the samples it loaded, up to the token cap
balance-data   samples move; ranks are made even in tokens
by-flops       samples move; ranks are made even in FLOPs of the model
calibrated     samples move; ranks are made even in the seconds of --cost seconds.json
dynamic-cp     the last of these, each micro-batch with a context-parallel size of its own

Invariant: one cost model judges all policies; each is planned with the cost that its flags select in training. Every
figure comes from plans of these very batches.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any

import numpy as np

from megatron_balance.cli.batches import GlobalBatch
from megatron_balance.cli.costs import Costs, num_gpus
from megatron_balance.cost.model import CostModel
from megatron_balance.planner import (
    ScheduleMetrics,
    build_data_schedule,
    is_makespan,
    resolve_objective,
)
from megatron_balance.record import RunInfo, RunRecord, StepRecord
from megatron_balance.record.judging import recosted, step_metrics, stock_step
from megatron_balance.topology import Limits, Topology

DYNAMIC_CP = "dynamic-cp"
_MEANS = ("step_imbalance", "microbatch_imbalance", "pipeline_imbalance", "num_microbatches", "mean_cp_size")


@dataclass(frozen=True)
class Policy:
    """One way to divide a global batch among ranks and micro-batches.

    Attributes:
        name: for tables.
        flags: training flags that select it; empty for stock.
        cost_model: cost that it evens out; None for stock, which does not pack.
        move_samples: samples may leave the rank that loaded them.
        dynamic_cp: each micro-batch has a context-parallel size of its own.
    """

    name: str
    _: KW_ONLY
    flags: str
    cost_model: CostModel | None
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
        seconds: predicted, of all steps.
    """

    policy: Policy
    steps: tuple[StepRecord, ...]
    metrics: tuple[ScheduleMetrics, ...]
    setting: RunInfo
    seconds: float

    @property
    def fits(self) -> bool:
        """No micro-batch is above the token cap."""
        return self.least_headroom >= 0

    @property
    def least_headroom(self) -> float:
        """Room below the token cap in the fullest micro-batch, as a fraction of the cap."""
        return min(step.cap_headroom or 0.0 for step in self.metrics)

    def figures(self, *, stock: PolicyResult) -> dict[str, Any]:
        """Its figures beside those of stock, as a line of a record: means over the steps, and the least headroom.

        Seconds are in an arbitrary unit where no speed is known. Tokens are original ones, not padding.
        """

        def mean(name: str) -> float:
            return float(np.mean([getattr(step, name) for step in self.metrics]))

        num_tokens = sum(int(step.segment_lengths.sum()) for step in self.steps)
        return {
            "kind": "policy",
            "name": self.policy.name,
            "flags": self.policy.flags,
            "seconds_per_step": self.seconds / len(self.steps),
            "tokens_per_second_per_gpu": num_tokens / (max(self.seconds, 1e-300) * num_gpus(self.setting.topology)),
            "speedup": stock.seconds / self.seconds if self.seconds else 1.0,
            "over_bound": mean("over_bound") - 1,
            "padding": mean("padding_fraction"),
            "cap_headroom": self.least_headroom,
            "plan_seconds": float(np.mean([step.plan_seconds for step in self.steps])),
            **{name: mean(name) for name in _MEANS},
        }


@dataclass(frozen=True, eq=False)
class Question:
    """What is compared: ranks, cap, objective, and the cost that judges.

    Attributes:
        costs: cost of a sample.
        topology: the ranks at one context-parallel size.
        limits: token cap of a micro-batch.
        objective: of a recorded run; None where the ranks decide it.
    """

    costs: Costs
    topology: Topology
    limits: Limits
    objective: str | None = None

    def setting(self, topology: Topology | None = None) -> RunInfo:
        """Ranks, limits, objective and the cost that judges."""
        topology = topology or self.topology
        return RunInfo(
            cost_model=self.costs.judging(topology),
            cost_name=self.costs.name,
            topology=topology,
            limits=self.limits,
            objective=resolve_objective(self.objective or "auto", topology=topology),
            policy="",
        )

    @property
    def waiting(self) -> str:
        """The imbalance that the predicted time follows: the objective's, or `pipeline` if the time is a makespan."""
        objective = self.setting().objective
        return "pipeline" if is_makespan(objective, topology=self.topology) else objective

    @property
    def dynamic_topology(self) -> Topology:
        """The ranks with dynamic context parallelism."""
        return replace(self.topology, dynamic_cp=True)

    def why_not_dynamic(self) -> str | None:
        """The reason why dynamic CP cannot be compared or trained with, or None."""
        if self.setting().objective != resolve_objective("auto", topology=self.topology):
            return "its objective follows from the ranks, and the run had another"
        return self.costs.why_not_dynamic(self.dynamic_topology)

    def policies(self) -> list[Policy]:
        """Stock, then policies by rising number of flags; dynamic CP last, on top of the best."""
        pack = f"--use-dynamic-batch-size --max-tokens-per-gpu {self.limits.max_tokens_per_gpu}"
        tokens, objective = CostModel.tokens(), self.setting().objective
        policies = [
            Policy("stock", flags="", cost_model=None, move_samples=False),
            Policy("packed", flags=pack, cost_model=tokens, move_samples=False),
            Policy("balance-data", flags=f"{pack} --balance-data", cost_model=tokens),
        ]
        by_flops = f"{pack} --balance-data --balance-by-flops"
        if self.costs.attention_rate != self.costs.default_rate:
            by_flops += f" --balance-attention-rate {self.costs.attention_rate:g}"
        if objective != resolve_objective("auto", topology=self.topology):
            by_flops += f" --balance-objective {objective}"
        flops = self.costs.flops(self.topology)
        if flops is not None:
            policies.append(Policy("by-flops", flags=by_flops, cost_model=flops))
        if self.costs.name == "seconds":
            file = self.costs.cost or "seconds.json"
            seconds = self.costs.planning(self.topology)
            policies.append(Policy("calibrated", flags=f"{by_flops} --balance-cost {file}", cost_model=seconds))
        if self.costs.name != "tokens" and self.why_not_dynamic() is None:
            best = policies[-1]
            policies.append(
                Policy(
                    DYNAMIC_CP,
                    flags=f"{best.flags} --balance-context-parallel",
                    cost_model=self.costs.planning(self.dynamic_topology),
                    dynamic_cp=True,
                )
            )
        return policies

    def plan(self, policy: Policy, batches: Sequence[GlobalBatch]) -> PolicyResult:
        """Plan every global batch under a policy."""
        setting = self.setting(self.dynamic_topology if policy.dynamic_cp else None)
        return self._judged(
            policy, [_planned(batch, policy, setting, index) for index, batch in enumerate(batches, start=1)], setting
        )

    def as_it_ran(self, record: RunRecord, batches: Sequence[GlobalBatch]) -> PolicyResult:
        """The recorded run's own plans for these batches, judged as the other policies are."""
        ran = [step for step in record.steps if step.segment_lengths.size][: len(batches)]
        policy = Policy("as it ran", flags=record.info.policy, cost_model=record.info.cost_model)
        return self._judged(policy, ran, self.setting(record.info.topology))

    def _judged(self, policy: Policy, steps: Sequence[StepRecord], setting: RunInfo) -> PolicyResult:
        judged = (recosted(step, cost_model=setting.cost_model, info=setting) for step in steps)
        metrics = tuple(step_metrics(step, info=setting) for step in judged)
        seconds = self.costs.seconds(
            sum(step.predicted_cost for step in metrics), objective=setting.objective, topology=setting.topology
        )
        setting = replace(setting, policy=f"megatron-balance compare, {policy.name}")
        return PolicyResult(policy, tuple(steps), metrics, setting, seconds)


def _planned(batch: GlobalBatch, policy: Policy, setting: RunInfo, iteration: int) -> StepRecord:
    started = time.perf_counter()
    schedule = build_data_schedule(
        batch.segment_lengths,
        num_segments=batch.num_segments,
        cost_model=policy.cost_model or setting.cost_model,
        topology=setting.topology,
        limits=setting.limits,
        objective=setting.objective,
        home_ranks=batch.home_ranks,
        move_samples=policy.move_samples,
    )
    step = StepRecord.of_schedule(schedule, iteration=iteration, plan_seconds=time.perf_counter() - started)
    return stock_step(step, info=setting) if policy.cost_model is None else step
