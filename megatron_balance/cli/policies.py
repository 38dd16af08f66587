"""Plans the same global batches under each policy, judges all of them by one cost model, and recommends one.

`compare --help` describes the policies. What is recommended:

    1. of the policies that are not slower than stock, those that keep every micro-batch under the token cap, where
       there are any
    2. of these at one context-parallel size, the one with the fewest flags within WORTH of the fastest
    3. dynamic CP, if it gains DYNAMIC_WORTH more, or is alone in keeping under the cap

Invariants: one cost judges all policies; each is planned with the cost that its flags select in training. All figures
come from plans of these very batches by the printed flags. No policy changes the order of the data.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from megatron_balance.cli.costs import Costs
from megatron_balance.cost.model import CostModel
from megatron_balance.planner import Problem, build_data_schedule, is_makespan, resolve_objective
from megatron_balance.record import RunInfo, StepRecord
from megatron_balance.report.figures import PolicyFigures
from megatron_balance.topology import Limits, Topology

WORTH = 0.01
"""A policy must gain at least this fraction to be worth its flags."""

DYNAMIC_WORTH = 0.05
"""Dynamic CP must gain at least this fraction over the best policy at one size, because bandwidths are assumed."""

_MEANS = ("step_imbalance", "microbatch_imbalance", "pipeline_imbalance", "num_microbatches", "mean_cp_size")


class Policy(NamedTuple):
    """One way to divide a global batch: training flags, none for stock (it does not pack), and the cost evened out."""

    name: str
    flags: str
    cost_model: CostModel
    move_samples: bool = True
    dynamic_cp: bool = False


@dataclass(frozen=True, eq=False, kw_only=True)
class PolicyResult(PolicyFigures):
    """All global batches under one policy, judged by the cost that judges every policy."""

    policy: Policy
    setting: RunInfo  # ranks and cost that its plans are judged by; with dynamic CP ranks are leaves

    @property
    def seconds(self) -> float:
        """Predicted, of all steps; in an arbitrary unit where no speed is known."""
        return float(self.times.sum())

    @property
    def fits(self) -> bool:
        """No micro-batch is above the token cap."""
        return self.least_headroom >= 0

    def speedup(self, other: PolicyResult) -> float:
        """Time of another policy over that of this one."""
        return other.seconds / self.seconds if self.seconds else 1.0

    def line(self, *, stock: PolicyResult) -> dict[str, Any]:
        """Its figures beside those of stock, as a line of a record: means over the steps, and the least headroom."""
        num_tokens = sum(int(step.lengths.sum()) for step in self.steps)
        info = self.setting  # the predicted time follows one imbalance
        waiting = "pipeline" if is_makespan(info.objective, topology=info.topology) else info.objective
        return {
            "kind": "policy",
            "name": self.policy.name,
            "flags": self.policy.flags,
            "seconds_per_step": self.seconds / len(self.steps),
            "tokens_per_second_per_gpu": num_tokens / (max(self.seconds, 1e-300) * info.topology.num_gpus),
            "speedup": self.speedup(stock),
            "over_bound": self.mean("over_bound") - 1,
            "padding": self.mean("padding_fraction"),
            "cap_headroom": self.least_headroom,
            "plan_ms": float(np.mean([step.plan_seconds for step in self.steps])) * 1e3,
            "imbalance": self.mean(f"{waiting}_imbalance"),
            **{name: self.mean(name) for name in _MEANS},
        }


@dataclass(frozen=True, eq=False)
class Question:
    """What is compared: costs, ranks at one size, and the token cap."""

    costs: Costs
    topology: Topology
    limits: Limits

    def policies(self) -> list[Policy]:
        """Stock, then policies by rising number of flags; dynamic CP last, on top of the best."""
        costs, tokens, dynamic = self.costs, CostModel.tokens(), replace(self.topology, dynamic_cp=True)
        flags = f"--use-dynamic-batch-size --max-tokens-per-gpu {self.limits.max_tokens_per_gpu}"
        policies = [
            Policy("stock", "", tokens, move_samples=False),
            Policy("packed", flags, tokens, move_samples=False),
        ]
        flags += " --balance-data"
        policies.append(Policy("balance-data", flags, tokens))
        flags += " --balance-by-flops"
        if costs.attention_rate != costs.default_rate:
            flags += f" --balance-attention-rate {costs.attention_rate:g}"
        if costs.name == "flops" or costs.shape is not None:
            policies.append(Policy("by-flops", flags, costs.planning("flops", self.topology)))
        if costs.name == "seconds":
            flags += f" --balance-cost {costs.cost or 'seconds.json'}"
            policies.append(Policy("calibrated", flags, costs.planning("seconds", self.topology)))
        if costs.name != "tokens" and costs.why_not_dynamic(dynamic) is None:
            flags += " --balance-context-parallel"
            policies.append(Policy("dynamic-cp", flags, costs.planning(costs.name, dynamic), dynamic_cp=True))
        return policies

    def plan(self, policy: Policy, batches: Sequence[Problem]) -> PolicyResult:
        """Plan every global batch under a policy."""
        topology = replace(self.topology, dynamic_cp=policy.dynamic_cp)
        steps: list[StepRecord] = []
        for iteration, batch in enumerate(batches, start=1):
            started = time.perf_counter()
            schedule = build_data_schedule(
                batch.segments,
                num_segments=batch.num_segments,
                image_patches=batch.images,
                cost_model=policy.cost_model,
                topology=topology,
                limits=self.limits,
                home_ranks=batch.home_ranks,
                move_samples=policy.move_samples,
            )
            step = StepRecord.of_schedule(schedule, iteration=iteration, plan_seconds=time.perf_counter() - started)
            steps.append(step if policy.flags else step.stock())
        return self.judge(policy, steps)

    def judge(self, policy: Policy, steps: Sequence[StepRecord]) -> PolicyResult:
        """The plans of a policy, judged as those of all others."""
        topology = steps[0].topology
        setting = RunInfo(
            cost_model=self.costs.judging(topology, packs=bool(policy.flags)),
            cost_name=self.costs.name,
            topology=topology,
            limits=self.limits,
            objective=resolve_objective("auto", topology=topology),
            policy=f"megatron-balance compare, {policy.name}",
        )
        shared = {name: getattr(setting, name) for name in ("cost_model", "limits", "objective")}
        judged = [replace(step, **shared) for step in steps]
        return PolicyResult(judged, self.costs.scale(topology), policy=policy, setting=setting)


def recommend(results: Sequence[PolicyResult]) -> tuple[PolicyResult, list[str]]:
    """Choose a policy, and say why. `results`: stock and packed first, then by rising number of flags."""
    stock = results[0]
    allowed = [result for result in results if result.seconds <= stock.seconds]
    fitting = [result for result in allowed if result.fits] or allowed
    fastest = min((result.seconds for result in fitting if not result.policy.dynamic_cp), default=float("inf"))
    worth = [result for result in fitting if result.seconds * (1 - WORTH) <= fastest]
    dynamic = [one for one in worth if one.policy.dynamic_cp and one.seconds < fastest * (1 - DYNAMIC_WORTH)]
    chosen = (dynamic or worth)[0]
    return chosen, list(_reasons(chosen, results=results))


def _reasons(chosen: PolicyResult, *, results: Sequence[PolicyResult]) -> Iterator[str]:
    """The advice in sentences."""
    stock, packed = results[0], results[1]
    if chosen is stock:
        yield f"Leave balancing off: no policy gains {WORTH:.0%} or more on these lengths and ranks."
    else:
        against = "" if chosen is packed else f", {chosen.speedup(packed):.2f}x that of packing alone"
        yield f"Use {chosen.policy.flags}. Expect {chosen.speedup(stock):.2f}x the speed of stock{against}."
    num_ranks = chosen.setting.topology.dynamic_cp_sizes[-1]  # that may share a sequence
    at_most = chosen.setting.topology.at_cp_size(num_ranks)
    lengths = np.concatenate([at_most.padded_seq_len(step.segments) for step in stock.steps])
    held, longest = num_ranks * (chosen.setting.limits.max_tokens_per_gpu or 0), int(lengths.max())
    if not chosen.fits:
        yield (
            f"{(lengths > held).sum()} of {lengths.size} sequences are longer than the cap of {held} tokens and run "
            f"alone above it, the longest with {longest}: raise --max-tokens-per-gpu to {-(-longest // num_ranks)} if "
            f"memory holds that, or cut them at {held}."
        )
    elif not stock.fits:
        yield f"The longest sequence has {longest} tokens: only {chosen.policy.name} keeps under the cap."
    floor = max(step.single_sample_floor for step in chosen.metrics)
    if chosen.policy.dynamic_cp:
        best = min((result for result in results if not result.policy.dynamic_cp), key=lambda result: result.seconds)
        gain = chosen.speedup(best)
        yield f"It is {gain:.2f}x as fast as {best.policy.name}. doctor -- FLAGS says which options it excludes."
    elif floor > 1.01:
        yield (
            f"The costliest sample takes up to {floor:.2f}x a rank's even share, and no plan at this context-parallel "
            "size is faster than it: take more samples a step, or cut it."
        )
    if chosen.setting.cost_name == "tokens" and all(result.policy.name != "by-flops" for result in results):
        yield "Judged by tokens alone: with --model, --balance-by-flops is compared as well."
