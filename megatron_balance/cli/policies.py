"""Plans the same global batches under each policy, and judges all of them by one cost model.

`compare --help` describes the policies.

Invariant: one cost model judges all policies; each is planned with the cost that its flags select in training. Every
figure comes from plans of these very batches.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any

import numpy as np

from megatron_balance.cli.costs import Costs, num_gpus
from megatron_balance.cost.model import CostModel
from megatron_balance.planner import Problem, build_data_schedule, is_makespan, resolve_objective
from megatron_balance.record import RunInfo, StepRecord
from megatron_balance.report.figures import PolicyFigures
from megatron_balance.topology import Limits, Topology

DYNAMIC_CP = "dynamic-cp"
_MEANS = ("step_imbalance", "microbatch_imbalance", "pipeline_imbalance", "num_microbatches", "mean_cp_size")


@dataclass(frozen=True)
class Policy:
    """One way to divide a global batch: the training flags that select it, and the cost that it evens out.

    Stock has neither: it does not pack.
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
        judged: their figures, by the cost model that judges every policy.
        setting: ranks and cost that the plans are judged by; with dynamic CP ranks are leaves.
    """

    policy: Policy
    steps: Sequence[StepRecord]
    judged: PolicyFigures
    setting: RunInfo

    @property
    def seconds(self) -> float:
        """Predicted, of all steps; in an arbitrary unit where no speed is known."""
        return float(self.judged.times.sum())

    @property
    def fits(self) -> bool:
        """No micro-batch is above the token cap."""
        return self.judged.least_headroom >= 0

    def speedup(self, other: PolicyResult) -> float:
        """Time of another policy over that of this one."""
        return other.seconds / self.seconds if self.seconds else 1.0

    def line(self, *, stock: PolicyResult) -> dict[str, Any]:
        """Its figures beside those of stock, as a line of a record: means over the steps, and the least headroom.

        Tokens are original ones, not padding.
        """
        judged, num_tokens = self.judged, sum(int(step.lengths.sum()) for step in self.steps)
        return {
            "kind": "policy",
            "name": self.policy.name,
            "flags": self.policy.flags,
            "seconds_per_step": self.seconds / len(self.steps),
            "tokens_per_second_per_gpu": num_tokens / (max(self.seconds, 1e-300) * num_gpus(self.setting.topology)),
            "speedup": self.speedup(stock),
            "over_bound": judged.mean("over_bound") - 1,
            "padding": judged.mean("padding_fraction"),
            "cap_headroom": judged.least_headroom,
            "plan_seconds": float(np.mean([step.plan_seconds for step in self.steps])),
            **{name: judged.mean(name) for name in _MEANS},
        }


@dataclass(frozen=True, eq=False)
class Question:
    """What is compared: costs, ranks at one size, token cap, and the objective of a recorded run, or `auto`."""

    costs: Costs
    topology: Topology
    limits: Limits
    objective: str = "auto"

    def setting(self, topology: Topology) -> RunInfo:
        """These ranks, limits, objective and the cost that judges."""
        return RunInfo(
            cost_model=self.costs.judging(topology),
            cost_name=self.costs.name,
            topology=topology,
            limits=self.limits,
            objective=resolve_objective(self.objective, topology=topology),
            policy="",
        )

    @property
    def waiting(self) -> str:
        """The imbalance that the predicted time follows: the objective's, or `pipeline` if the time is a makespan."""
        objective = resolve_objective(self.objective, topology=self.topology)
        return "pipeline" if is_makespan(objective, topology=self.topology) else objective

    @property
    def dynamic_topology(self) -> Topology:
        """The ranks with dynamic context parallelism."""
        return replace(self.topology, dynamic_cp=True)

    @property
    def has_own_objective(self) -> bool:
        """The recorded run had another objective than follows from its ranks."""
        own, usual = (resolve_objective(name, topology=self.topology) for name in (self.objective, "auto"))
        return own != usual

    def why_not_dynamic(self) -> str | None:
        """The reason why dynamic CP cannot be compared or trained with, or None."""
        if self.has_own_objective:
            return "its objective follows from the ranks, and the run had another"
        return self.costs.why_not_dynamic(self.dynamic_topology)

    def policies(self) -> list[Policy]:
        """Stock, then policies by rising number of flags; dynamic CP last, on top of the best."""
        costs, tokens = self.costs, CostModel.tokens()
        pack = f"--use-dynamic-batch-size --max-tokens-per-gpu {self.limits.max_tokens_per_gpu}"
        policies = [
            Policy("stock", flags="", cost_model=None, move_samples=False),
            Policy("packed", flags=pack, cost_model=tokens, move_samples=False),
            Policy("balance-data", flags=f"{pack} --balance-data", cost_model=tokens),
        ]
        by_flops = f"{pack} --balance-data --balance-by-flops"
        if costs.attention_rate != costs.default_rate:
            by_flops += f" --balance-attention-rate {costs.attention_rate:g}"
        if self.has_own_objective:
            by_flops += f" --balance-objective {self.objective}"
        flops = costs.flops(self.topology)
        if flops is not None:
            policies.append(Policy("by-flops", flags=by_flops, cost_model=flops))
        if costs.name == "seconds":
            flags = f"{by_flops} --balance-cost {costs.cost or 'seconds.json'}"
            policies.append(Policy("calibrated", flags=flags, cost_model=costs.planning(self.topology)))
        if costs.name != "tokens" and self.why_not_dynamic() is None:
            flags = f"{policies[-1].flags} --balance-context-parallel"
            cost_model = costs.planning(self.dynamic_topology)
            policies.append(Policy(DYNAMIC_CP, flags=flags, cost_model=cost_model, dynamic_cp=True))
        return policies

    def plan(self, policy: Policy, batches: Sequence[Problem]) -> PolicyResult:
        """Plan every global batch under a policy."""
        setting = self.setting(self.dynamic_topology if policy.dynamic_cp else self.topology)
        return self.judge(policy, [_planned(batch, policy, setting, at) for at, batch in enumerate(batches, start=1)])

    def judge(self, policy: Policy, steps: Sequence[StepRecord]) -> PolicyResult:
        """The plans of a policy, judged as those of all others."""
        setting = replace(self.setting(steps[0].topology), policy=f"megatron-balance compare, {policy.name}")
        judged = [replace(step, limits=self.limits).recosted(setting.cost_model) for step in steps]
        return PolicyResult(policy, steps, PolicyFigures(judged, self.costs.scale(setting.topology)), setting)


def _planned(batch: Problem, policy: Policy, setting: RunInfo, iteration: int) -> StepRecord:
    started = time.perf_counter()
    schedule = build_data_schedule(
        batch.segments,
        num_segments=batch.num_segments,
        cost_model=policy.cost_model or setting.cost_model,
        topology=setting.topology,
        limits=setting.limits,
        objective=setting.objective,
        home_ranks=batch.home_ranks,
        move_samples=policy.move_samples,
    )
    step = StepRecord.of_schedule(schedule, iteration=iteration, plan_seconds=time.perf_counter() - started)
    return step.stock() if policy.cost_model is None else step
