"""Plans the same global batches under each policy, judges all of them by one cost model, and recommends one.

`compare --help` describes the policies. What is recommended:

    1. of the policies at one context-parallel size, the one with the fewest flags within WORTH of the fastest
    2. dynamic CP, if it gains DYNAMIC_WORTH more, because bandwidths are assumed; WORTH where they were measured

Invariants: one cost judges all policies; each is planned with the cost that its flags select in training. All figures
come from plans of these very batches by the printed flags. No policy changes the order of the data. None is compared
that the run's own options refuse.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from megatron_balance.cli.costs import GPUS_PER_NODE, Costs
from megatron_balance.cli.flags import options_of
from megatron_balance.cost.model import CostModel
from megatron_balance.mcore.setup.rules import problems
from megatron_balance.planner import build_data_schedule, is_makespan, resolve_objective
from megatron_balance.record import RunInfo, RunRecord, StepRecord
from megatron_balance.report.figures import PolicyFigures
from megatron_balance.topology import Limits, Topology

WORTH = 0.01  # a policy must gain this fraction to be worth its flags
DYNAMIC_WORTH = 0.05  # dynamic CP over one size, where bandwidths are assumed

_MEANS = (
    *("step_imbalance", "microbatch_imbalance", "pipeline_imbalance", "unavoidable_waiting"),
    *("num_microbatches", "mean_cp_size"),
)


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
    def time(self) -> float:
        """Predicted, of all steps; in the unit of its scale, of one GPU."""
        return float(self.times.sum())

    def speedup(self, other: PolicyResult) -> float:
        """Time of another policy over that of this one."""
        return other.time / self.time if self.time else 1.0

    def line(self, *, stock: PolicyResult, bounds: Sequence[int] | None = None) -> dict[str, Any]:
        """Its figures beside those of stock, as a line of a record; `bounds` are those of samples, for stock rows."""
        num_tokens, per_step = sum(int(step.lengths.sum()) for step in self.steps), self.time / len(self.steps)
        info = self.setting  # the predicted time follows one imbalance
        waiting = "pipeline" if is_makespan(info.objective, topology=info.topology) else info.objective
        over = [step.predicted_cost / bound for step, bound in zip(self.metrics, bounds or (), strict=False) if bound]
        known = self.scale.unit == "s" and per_step > 0
        return {
            "kind": "policy",
            "name": self.policy.name,
            "flags": self.policy.flags,
            "seconds_per_step": per_step if known else None,
            "tokens_per_second_per_gpu": num_tokens / (self.time * info.topology.num_gpus) if known else None,
            "cost_per_gpu": None if known else per_step,  # FLOPs or tokens of the slowest, of any policy comparable
            "speedup": self.speedup(stock),
            "over_bound": (float(np.mean(over)) if over else self.mean("over_bound")) - 1,
            "padding": self.mean("padding_fraction"),
            "cap_headroom": self.least_headroom,
            "plan_ms": float(np.mean([step.plan_seconds for step in self.steps])) * 1e3,
            "imbalance": self.mean(f"{waiting}_imbalance"),
            **{name: self.mean(name) for name in _MEANS},
        }


@dataclass(frozen=True, eq=False)
class Question:
    """What is compared: costs, ranks at one size, the token cap, and the options of the training script."""

    costs: Costs
    topology: Topology
    limits: Limits
    script_flags: Sequence[str] = ()
    data_options: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def policies(self) -> tuple[list[Policy], list[str]]:
        """Stock, then policies by rising number of flags, dynamic CP last; and why others are not compared."""
        costs, tokens, dynamic = self.costs, CostModel.tokens(), replace(self.topology, dynamic_cp=True)
        flags = f"--use-dynamic-batch-size --max-tokens-per-gpu {self.limits.max_tokens_per_gpu}"
        policies = [
            Policy(name, given, tokens, move_samples=False) for name, given in (("stock", ""), ("packed", flags))
        ]
        flags += " --balance-data"
        policies.append(Policy("balance-data", flags, tokens))
        flags += " --balance-by-flops"
        if costs.attention_rate != costs.default_rate:
            flags += f" --balance-attention-rate {costs.attention_rate:g}"
        if costs.name == "flops" or costs.shape is not None:
            policies.append(Policy("by-flops", flags, costs.planning("flops", self.topology)))
        if costs.name == "seconds":
            flags = flags.partition(" --balance-by-flops")[0] + f" --balance-cost {costs.cost or 'seconds.json'}"
            policies.append(Policy("calibrated", flags, costs.planning("seconds", self.topology)))
        reasons = list[str]()
        if costs.name != "tokens":
            flags += " --balance-dynamic-cp"
            if not costs.knows_exchange(dynamic):
                reasons.append("dynamic CP is not compared: what its ranks would receive is not known: add --model")
            else:
                policies.append(Policy("dynamic-cp", flags, costs.planning(costs.name, dynamic), dynamic_cp=True))
        against = {policy.name: problems(self.options(policy))[:1] for policy in policies[1:]}
        reasons += [f"{name} is not compared: {problem}" for name, refusals in against.items() for problem in refusals]
        return [policy for policy in policies if not against.get(policy.name)], reasons

    def options(self, policy: Policy) -> dict[str, Any]:
        """The options of a run under a policy, as far as they are known."""
        shape, ranks = self.costs.shape, self.topology
        sizes = {
            "tensor_model_parallel_size": ranks.tp_size,
            "pipeline_model_parallel_size": ranks.pp_size,
            "context_parallel_size": ranks.cp_size,
            "expert_model_parallel_size": ranks.ep_size,
            "expert_tensor_parallel_size": ranks.etp_size,
            "use_megatron_fsdp": ranks.fully_sharded,
            "calculate_per_token_loss": True,
        }
        fields = {} if shape is None else vars(shape)  # they have the names of Megatron's options
        return {**fields, **sizes, **self.data_options, **options_of(self.script_flags, balance=policy.flags.split())}

    def command(self, policy: Policy) -> str:
        """The command that trains under a policy."""
        gpus = self.topology.num_gpus
        nodes = f"--nnodes {-(-gpus // GPUS_PER_NODE)} " if gpus > GPUS_PER_NODE else ""
        # Megatron's default, allgather, is refused where experts are spread over replicas.
        spread = self.topology.ep_dp_size > 1 and "moe_token_dispatcher_type" not in self.options(policy)
        return (
            f"torchrun {nodes}--nproc-per-node {min(gpus, GPUS_PER_NODE)} -m megatron_balance.launch YOUR_SCRIPT … "
            f"--calculate-per-token-loss {'--moe-token-dispatcher-type alltoall ' if spread else ''}{policy.flags}"
        )

    def plan(self, policy: Policy, batches: Sequence[StepRecord]) -> Iterator[StepRecord]:
        """Plan every global batch under a policy."""
        topology = replace(self.topology, dynamic_cp=policy.dynamic_cp)
        for iteration, batch in enumerate(batches, start=1):
            if not policy.flags:
                yield replace(batch, topology=self.topology, iteration=iteration).stock()
                continue
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
            spent = time.perf_counter() - started
            rows = {"rows": batch.rows, "row_tokens": batch.row_tokens}
            yield StepRecord.from_schedule(schedule, iteration=iteration, plan_seconds=spent, **rows)

    def judge(self, policy: Policy, steps: Sequence[StepRecord], *, row_tokens: int | None = None) -> PolicyResult:
        """The plans of a policy, judged as those of all others; stock has a sample, or `row_tokens`, in each pack."""
        topology = steps[0].topology
        setting = RunInfo(
            cost_model=self.costs.judging(topology, pack_tokens=None if policy.flags else row_tokens or 0),
            cost_name=self.costs.name,
            topology=topology,
            limits=self.limits,
            objective=resolve_objective("auto", topology=topology),
            policy=f"megatron-balance compare, {policy.name}",
            row_tokens=steps[0].row_tokens,
        )
        shared = {name: getattr(setting, name) for name in ("cost_model", "limits", "objective")}
        judged = [replace(step, **shared) for step in steps]
        return PolicyResult(judged, self.costs.scale(topology), policy=policy, setting=setting)


def recommend(
    results: Sequence[PolicyResult], *, question: Question, record: RunRecord | None = None
) -> tuple[PolicyResult, list[str]]:
    """Choose a policy, and say why. `results`: stock first, then by rising number of flags."""
    worth = DYNAMIC_WORTH if question.costs.assumes_bandwidth else WORTH
    of_one_size = [result for result in results if not result.policy.dynamic_cp]
    best = min(of_one_size, key=lambda result: result.time)
    chosen = next(result for result in of_one_size if result.time * (1 - WORTH) <= best.time)
    dynamic = next((result for result in results if result.policy.dynamic_cp), None)
    if dynamic is not None and dynamic.time < best.time * (1 - worth):
        chosen = dynamic
    return chosen, list(_reasons(chosen, results=results, best=best, question=question, record=record))


def _reasons(
    chosen: PolicyResult,
    *,
    results: Sequence[PolicyResult],
    best: PolicyResult,
    question: Question,
    record: RunRecord | None,
) -> Iterator[str]:
    """The advice in sentences."""
    stock, packed = results[0], next((result for result in results if result.policy.name == "packed"), results[0])
    if chosen is stock:
        yield f"Leave balancing off: no policy gains {WORTH:.0%} or more on these lengths and ranks."
    else:
        against = "" if chosen is packed else f", {chosen.speedup(packed):.2f}x that of packing alone"
        measured = [step for step in record.steps if step.is_measured] if record is not None else []
        waits = sum(step.exposed_seconds for step in measured)
        total = waits + sum(float(step.seconds.sum(axis=1).max()) for step in measured)
        share = "an unknown time"
        if total:
            share = f"at least {waits / total:.1%} of the time (measured: plans and samples, without the optimizer)"
        yield (
            f"At most {chosen.speedup(stock):.2f}x the speed of stock{against}, in forward and backward passes. Beside "
            f"them a step spends {share}."
        )
        yield question.command(chosen.policy)
        yield "or --balance in place of the last flags: it takes what is safe for the run."
    unavoidable = best.mean("unavoidable_waiting")
    if unavoidable > WORTH:
        remedy = "" if chosen.policy.dynamic_cp else ". Take more samples a step, or cut it"
        yield (
            f"At this context-parallel size GPUs wait {unavoidable:.0%} of the time or more, whatever the plan: a "
            f"sample costs more than a rank's share{remedy}."
        )
    if chosen.policy.dynamic_cp:
        yield f"Context-parallel sizes of their own are {chosen.speedup(best):.2f}x as fast as {best.policy.name}."
    num_ranks = chosen.setting.topology.dynamic_cp_sizes[-1]  # that may share a sequence
    at_most = chosen.setting.topology.with_cp_size(num_ranks)
    lengths = np.concatenate([step.segments for step in packed.steps])
    padded, cap = at_most.padded_seq_len(lengths), num_ranks * (chosen.setting.limits.max_tokens_per_gpu or 0)
    shared = any(result.policy.dynamic_cp and result.least_headroom >= 0 for result in results if result is not chosen)
    if chosen is not stock and (num_over := int((padded > cap).sum())):
        yield (
            f"{num_over} of {lengths.size} samples are longer than the cap of {cap} tokens and run alone above it, the "
            f"longest with {lengths.max()}: --max-tokens-per-gpu {-(-int(padded.max()) // num_ranks)} holds it, if "
            f"memory does; else cut them at {cap}{', or add --balance-dynamic-cp' if shared else ''}."
        )
    if chosen.setting.cost_name == "tokens" and all(result.policy.name != "by-flops" for result in results):
        yield "Judged by tokens alone: with --model, --balance-by-flops is compared as well."
