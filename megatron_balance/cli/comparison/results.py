"""Compares policies over the same steps, with the figures that the table and the recommendation show.

Invariant: every figure comes from plans of these very batches, judged by one cost model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from megatron_balance.cli.comparison.batches import GlobalBatch, recorded_steps
from megatron_balance.cli.comparison.communication import dynamic_cp_refusal
from megatron_balance.cli.comparison.cost_source import CostSource
from megatron_balance.cli.comparison.policies import (
    Policy,
    PolicyResult,
    plan_policy,
    token_policies,
)
from megatron_balance.cli.comparison.throughput import CostRate, num_gpus, step_seconds
from megatron_balance.planner import is_makespan, resolve_objective
from megatron_balance.record.judging import recosted, step_metrics
from megatron_balance.record.run_record import RunInfo, RunRecord
from megatron_balance.topology import Limits, Topology


@dataclass(frozen=True)
class PolicyMeans:
    """Figures of one policy over all steps: means, and the least headroom.

    Attributes:
        name: of the policy.
        flags: training flags that select it.
        seconds_per_step: predicted, in seconds where the rate is absolute, else in an arbitrary unit.
        tokens_per_second_per_gpu: original tokens (no padding) of a step, by its predicted time and all GPUs.
        speedup: predicted time under stock over this one's.
        free_speedup: `speedup` with free communication; None if none is counted.
        step_imbalance, microbatch_imbalance, pipeline_imbalance: as in ScheduleMetrics.
        over_bound: predicted time over the lower bound, less 1.
        padding: part of the tokens run that is padding.
        cap_headroom: room below the token cap in the fullest micro-batch of all steps; negative if one sample
            is longer.
        num_microbatches: of one rank in one step.
        plan_seconds: to plan a step.
        mean_cp_size: ranks that share a token by context parallelism.
    """

    name: str
    flags: str
    seconds_per_step: float
    tokens_per_second_per_gpu: float
    speedup: float
    free_speedup: float | None
    step_imbalance: float
    microbatch_imbalance: float
    pipeline_imbalance: float
    over_bound: float
    padding: float
    cap_headroom: float
    num_microbatches: float
    plan_seconds: float
    mean_cp_size: float


@dataclass(frozen=True, eq=False)
class Comparison:
    """Policies side by side.

    Attributes:
        setting: ranks, limits and the cost that judges.
        costs: cost of a sample, and seconds per unit of cost.
        batches: `[num_steps]` in the order of training.
        results: one a policy; stock is the first.
    """

    setting: RunInfo
    costs: CostSource
    batches: Sequence[GlobalBatch]
    results: tuple[PolicyResult, ...]

    @property
    def stock(self) -> PolicyResult:
        """The policy that all others are compared to."""
        return self.results[0]

    @property
    def waiting(self) -> str:
        """The imbalance that the predicted time follows: the objective's, or `pipeline` if the time is a makespan."""
        objective = self.setting.objective
        return "pipeline" if is_makespan(objective, topology=self.setting.topology) else objective

    @property
    def rate(self) -> CostRate:
        """Seconds per unit of cost at one context-parallel size."""
        return self.costs.rate(self.setting.topology)

    @property
    def counts_communication(self) -> bool:
        """True if the cost of some policy includes communication."""
        return any(result.free_costs for result in self.results)

    def seconds(self, result: PolicyResult, *, free: bool = False) -> float:
        """Predicted time of a policy's steps; with `free`, without communication."""
        topology = result.setting.topology
        return step_seconds(
            sum(result.free_costs) if free and result.free_costs else result.predicted_cost,
            objective=result.setting.objective,
            topology=topology,
            rate=self.costs.rate(topology),
        )

    def speedup(self, result: PolicyResult, *, over: PolicyResult, free: bool = False) -> float:
        """Predicted time of `over` divided by that of `result`; 1 if the latter is zero."""
        seconds = self.seconds(result, free=free)
        return self.seconds(over, free=free) / seconds if seconds else 1.0

    def figures(self, result: PolicyResult) -> PolicyMeans:
        """The figures of a policy for tables."""
        seconds, num_steps = self.seconds(result), len(result.steps)
        num_tokens = sum(batch.num_tokens for batch in self.batches)
        gpus = num_gpus(self.setting.topology)
        return PolicyMeans(
            name=result.policy.name,
            flags=result.policy.flags,
            seconds_per_step=seconds / num_steps,
            tokens_per_second_per_gpu=num_tokens / (seconds * gpus) if seconds else 0.0,
            speedup=self.speedup(result, over=self.stock),
            free_speedup=self.speedup(result, over=self.stock, free=True) if self.counts_communication else None,
            step_imbalance=result.mean(lambda figures: figures.step_imbalance),
            microbatch_imbalance=result.mean(lambda figures: figures.microbatch_imbalance),
            pipeline_imbalance=result.mean(lambda figures: figures.pipeline_imbalance),
            over_bound=result.mean(lambda figures: figures.over_bound) - 1,
            padding=result.mean(lambda figures: figures.padding_fraction),
            cap_headroom=min(step.cap_headroom or 0.0 for step in result.metrics),
            num_microbatches=result.mean(lambda figures: figures.num_microbatches),
            plan_seconds=result.mean_plan_seconds,
            mean_cp_size=result.mean(lambda figures: figures.mean_cp_size),
        )


@dataclass(frozen=True, eq=False)
class Question:
    """The comparison that the flags describe, for any ranks and cap.

    Attributes:
        costs: cost of a sample.
        objective: `--objective`; None for auto.
        algorithm: of the policies that balance by FLOPs or seconds.
        max_cp_size: largest context-parallel size under dynamic CP; None for all ranks.
    """

    costs: CostSource
    objective: str | None
    algorithm: str
    max_cp_size: int | None = None

    def setting(self, topology: Topology, *, limits: Limits) -> RunInfo:
        """Ranks, limits, objective and the cost that judges."""
        return RunInfo(
            cost_model=self.costs.cost_model(topology),
            cost_name=self.costs.cost_name,
            topology=topology,
            limits=limits,
            objective=resolve_objective(self.objective or "auto", topology=topology),
            policy="",
        )

    def policies(self, setting: RunInfo) -> list[Policy]:
        """Stock, then policies by rising number of flags; dynamic CP last, on top of the best."""
        policies = token_policies(max_tokens_per_gpu=setting.limits.max_tokens_per_gpu)
        flags = f"{policies[-1].flags} --balance-by-flops"
        if self.algorithm != "auto":
            flags += f" --balance-algorithm {self.algorithm}"
        if setting.objective != resolve_objective("auto", topology=setting.topology):
            flags += f" --balance-objective {setting.objective}"
        flops = self.costs.flops_model(setting.topology)
        if flops is not None:
            policies.append(Policy("by-flops", flags=flags, cost_model=flops, algorithm=self.algorithm))
        calibrated = self.costs.calibrated_model(setting.topology)
        if calibrated is not None:
            how = f"--balance-cost {self.costs.cost or 'seconds.json'}"  # of a recorded run the file is not known
            policies.append(
                Policy("calibrated", flags=f"{flags} {how}", cost_model=calibrated, algorithm=self.algorithm)
            )
        best = policies[-1]
        if best.name in ("by-flops", "calibrated") and self.why_not_dynamic(setting) is None:
            policies.append(self.dynamic_policy(best, topology=setting.topology))
        return policies

    def why_not_dynamic(self, setting: RunInfo) -> str | None:
        """The reason why dynamic CP cannot be compared or trained with, or None."""
        there = self.dynamic_topology(setting.topology)
        if setting.objective != resolve_objective("auto", topology=setting.topology) or self.algorithm != "auto":
            return "--balance-context-parallel has one algorithm, and its objective follows from the ranks"
        refusal = dynamic_cp_refusal(self.costs.shape, topology=there)
        if refusal is None and self.costs.exchange(there, cost_name=self.costs.cost_name) is None:
            return "the exchange between context-parallel ranks is not known: add --model"
        return refusal

    def dynamic_topology(self, topology: Topology) -> Topology:
        """The ranks with dynamic context parallelism."""
        return replace(topology, dynamic_cp=True, max_cp_size=self.max_cp_size)

    def dynamic_policy(self, policy: Policy, *, topology: Topology) -> Policy:
        """A policy by FLOPs or seconds, with dynamic context parallelism."""
        there = self.dynamic_topology(topology)
        model = self.costs.calibrated_model(there) or self.costs.flops_model(there)
        flag = "--balance-context-parallel" + ("" if self.max_cp_size is None else f" {self.max_cp_size}")
        return replace(
            policy, name=f"{policy.name}, dynamic CP", flags=f"{policy.flags} {flag}", cost_model=model, dynamic_cp=True
        )

    def compare(
        self,
        batches: Sequence[GlobalBatch],
        *,
        topology: Topology,
        limits: Limits,
        policies: Sequence[Policy] | None = None,
        after_step: Callable[[], None] = lambda: None,
    ) -> Comparison:
        """Plan the batches under every policy.

        Args:
            batches: `[num_steps]`.
            topology: the ranks.
            limits: token cap of a micro-batch.
            policies: the policies to plan, stock first; None for all.
            after_step: called after every planned step of every policy.
        """
        setting = self.setting(topology, limits=limits)
        chosen = self.policies(setting) if policies is None else policies
        results: list[PolicyResult] = []
        for policy in chosen:
            there = self.dynamic_topology(topology) if policy.dynamic_cp else topology
            judging = self.setting(there, limits=limits)
            free = replace(judging, cost_model=self.costs.cost_model(there, free=True))
            result = plan_policy(policy, batches, setting=judging, free=free.cost_model, after_step=after_step)
            if policy.dynamic_cp:
                # Free communication has other best plans.
                unpriced = replace(policy.cost_model or free.cost_model, cp_exchange=0)
                others = plan_policy(replace(policy, cost_model=unpriced), batches, setting=free)
                result = replace(result, free_costs=tuple(step.predicted_cost for step in others.metrics))
            results.append(result)
        return Comparison(setting, self.costs, batches, tuple(results))


def as_it_ran(record: RunRecord, *, batches: Sequence[GlobalBatch], setting: RunInfo) -> PolicyResult:
    """The recorded run's own plans for these batches, judged as the other policies are."""
    steps = tuple(
        recosted(step, cost_model=setting.cost_model, info=setting)
        for step, _ in zip(recorded_steps(record), batches, strict=False)
    )
    policy = Policy("as it ran", flags=record.info.policy, cost_model=setting.cost_model)
    return PolicyResult(policy, steps, tuple(step_metrics(step, info=setting) for step in steps), setting)
