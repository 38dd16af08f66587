"""Recommends a policy, and says why in sentences.

1. of the policies at one context-parallel size, the one with the fewest flags within WORTH of the fastest
2. dynamic CP, if it gains DYNAMIC_WORTH more, because bandwidths are assumed; WORTH where they were measured
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from megatron_balance.cli.costs import CompareCosts
from megatron_balance.cli.data import recorded_batches
from megatron_balance.cli.fit import fit_record
from megatron_balance.cli.policies import Comparison, Policy, PolicyResult
from megatron_balance.cli.terminal import progress
from megatron_balance.errors import BalanceError
from megatron_balance.mcore.setup.rules import problems
from megatron_balance.record import RunRecord
from megatron_balance.topology import Limits, Topology

WORTH = 0.01  # a policy must gain this fraction to be worth its flags
DYNAMIC_WORTH = 0.05  # dynamic CP over one size, where bandwidths are assumed
SETTING_SAMPLES = 2**12  # of a record, that other settings are planned for


def recommend(
    results: Sequence[PolicyResult], *, comparison: Comparison, record: RunRecord | None = None
) -> tuple[PolicyResult, list[str]]:
    """Choose a policy, and say why. `results`: stock first, then by rising number of flags."""
    worth = DYNAMIC_WORTH if comparison.costs.assumes_bandwidth else WORTH
    static = [result for result in results if not result.policy.dynamic_cp]
    best = min(static, key=lambda result: result.time)
    chosen = next(result for result in static if result.time * (1 - WORTH) <= best.time)
    dynamic = next((result for result in results if result.policy.dynamic_cp), None)
    if dynamic is not None and dynamic.time < best.time * (1 - worth):
        chosen = dynamic
    return chosen, list(_reasons(chosen, results=results, best=best, comparison=comparison, record=record))


def _reasons(
    chosen: PolicyResult,
    *,
    results: Sequence[PolicyResult],
    best: PolicyResult,
    comparison: Comparison,
    record: RunRecord | None,
) -> Iterator[str]:
    """The advice in sentences."""
    by_name = {result.policy.name: result for result in results}
    stock, packed = results[0], by_name.get("packed", results[0])
    if chosen is stock:
        yield f"Leave balancing off: no policy gains {WORTH:.0%} or more on these lengths and ranks."
    else:
        against = "" if chosen is packed else f", {chosen.speedup(packed):.2f}x that of packing alone"
        measured = [step for step in record.steps if step.is_measured] if record is not None else []
        waits = sum(step.exposed_seconds for step in measured)
        total = waits + sum(float(step.seconds.sum(axis=1).max()) for step in measured)
        overhead = "an unknown time"
        if total:
            overhead = f"at least {waits / total:.1%} of the time (measured: plans and samples, without the optimizer)"
        yield (
            f"At most {chosen.speedup(stock):.2f}x the speed of stock{against}, in forward and backward passes. Beside "
            f"them a step spends {overhead}."
        )
        yield comparison.command(chosen.policy)
        yield "or --balance in place of the last flags: it enables every feature that no rule excludes."
    unavoidable = best.mean("unavoidable_waiting")
    if unavoidable > WORTH:
        remedy = "" if chosen.policy.dynamic_cp else ". Take more samples a step, or cut it"
        yield (
            f"At this context-parallel size GPUs wait {unavoidable:.0%} of the time or more, whatever the plan: a "
            f"sample costs more than a rank's share{remedy}."
        )
    if chosen.policy.dynamic_cp:
        yield f"dynamic-cp is {chosen.speedup(best):.2f}x as fast as {best.policy.name}."
    num_ranks = chosen.info.topology.dynamic_cp_sizes[-1]  # that may share a sequence
    at_most = chosen.info.topology.with_cp_size(num_ranks)
    lengths = np.concatenate([step.segments for step in packed.steps])
    padded, cap = at_most.padded_seq_len(lengths), num_ranks * (chosen.info.limits.max_tokens_per_gpu or 0)
    shared = any(result.policy.dynamic_cp and result.least_headroom >= 0 for result in results if result is not chosen)
    if chosen is not stock and (num_over := int((padded > cap).sum())):
        yield (
            f"{num_over} of {lengths.size} samples are longer than the cap of {cap} tokens and run alone above it, the "
            f"longest with {lengths.max()}: --max-tokens-per-gpu {-(-int(padded.max()) // num_ranks)} holds it, if "
            f"memory does; else cut them at {cap}{', or add --balance-dynamic-cp' if shared else ''}."
        )
    if chosen.info.cost_name == "tokens" and "by-flops" not in by_name:
        yield "Judged by tokens alone: with --model, --balance-by-flops is compared as well."


@dataclass(frozen=True)
class _Setting:
    """A cap and context-parallel sizes that a run could have, and the speed of its plans over those that ran."""

    topology: Topology
    cap: int
    speed: float

    def flags(self, record: RunRecord) -> list[str]:
        """The flags that set it, but for what the run has."""
        run, size = record.info.topology, self.topology.cp_size
        flags = [f"--max-tokens-per-gpu {self.cap}"] if self.cap != record.info.limits.max_tokens_per_gpu else []
        flags += [f"--context-parallel-size {size}"] if size != run.cp_size else []
        names = {True: "--balance-dynamic-cp", False: "--no-balance-dynamic-cp"}
        return flags + [names[self.topology.dynamic_cp]] * (self.topology.dynamic_cp != run.dynamic_cp)


def advise_settings(record: RunRecord, *, comparison: Comparison) -> Iterator[str]:
    """Other caps and context-parallel sizes on the GPUs of a record, by its own seconds and its measured cap."""
    run, cap = record.info.topology, record.info.limits.max_tokens_per_gpu
    if cap is None or not any(step.is_measured for step in record.steps):
        return
    try:
        fit, calibration = fit_record(record)
    except BalanceError as error:
        yield f"Other caps and context-parallel sizes are not compared: {error}"
        return
    costs = CompareCosts("seconds.json", comparison.costs.model, None, record, cap, fitted=calibration)
    knows_exchange = costs.knows_exchange(replace(run, dynamic_cp=True))
    recorded = [step for step in record.steps if step.lengths.size]
    recorded = recorded[: max(SETTING_SAMPLES // recorded[0].lengths.size, 1)]
    policy = Policy("as it ran", "as it ran", record.info.cost_model, dynamic_cp=run.dynamic_cp)
    as_it_ran = replace(comparison, costs=costs).judge(policy, recorded)
    room = max(_tokens_per_gpu(as_it_ran), record.measured_cap or cap)
    settings = _settings(as_it_ran, record=record, comparison=replace(comparison, costs=costs), room=room)
    yield f"On the same GPUs, by the seconds that are fitted to this record (off by {fit.error:.1%}), at most:"
    speed = 1.0
    kinds = {
        "cap": [setting for setting in settings if setting.topology == run],
        "one size": [setting for setting in settings if not setting.topology.dynamic_cp],
        "dynamic": [setting for setting in settings if setting.topology.dynamic_cp],
    }
    for name, kind in kinds.items():
        if not kind:
            continue
        worth = DYNAMIC_WORTH if name == "dynamic" and costs.assumes_bandwidth else WORTH
        fastest = max(setting.speed for setting in kind)
        similar = [setting for setting in kind if setting.speed >= fastest * (1 - WORTH)]
        simplest = min(similar, key=lambda setting: (len(setting.flags(record)), setting.cap))
        if simplest.speed > speed * (1 + worth):
            speed = simplest.speed
            flags = " ".join(simplest.flags(record)) or "--balance-cost seconds.json of megatron-balance fit"
            yield f"  {speed:.2f}x as fast as it ran: {flags}"
    if speed == 1.0:
        yield f"  no other cap or context-parallel size gains {WORTH:.0%} or more."
    gaps = ["efficiency at other sizes, which is taken to be that of the run"]
    if record.measured_cap is None:
        gaps.append(f"memory: no more than {room} tokens per GPU, which ran, are compared")
    if not knows_exchange:
        gaps.append("what context-parallel ranks receive: with --model other sizes are compared")
    elif costs.assumes_bandwidth:
        gaps.append("the bandwidth between context-parallel ranks, which is assumed")
    yield f"Not measured: {'; '.join(gaps)}."
    if record.info.environment.get("recompute") == "full":
        yield (
            "Try to do without --recompute-granularity full: it repeats the forward pass, up to a quarter of a step. "
            "Activations then take up to 18 times the memory per token: lower --max-tokens-per-gpu, and share "
            "samples by --context-parallel-size, --balance-dynamic-cp or --tensor-model-parallel-size 2."
        )


def _settings(as_it_ran: PolicyResult, *, record: RunRecord, comparison: Comparison, room: int) -> list[_Setting]:
    """All settings that no rule refuses, and whose plans put at most `room` tokens on a GPU."""
    run, cap, costs = record.info.topology, record.info.limits.max_tokens_per_gpu or 0, comparison.costs
    knows_exchange = costs.knows_exchange(replace(run, dynamic_cp=True))
    caps = sorted({size for size in (cap // 2, cap, 2 * cap, record.measured_cap or cap) if 0 < size <= room})
    sizes = [size for size in (1, 2, 4, 8, 16) if run.dp_cp_size % size == 0] if knows_exchange else [run.cp_size]
    static = [replace(run.with_cp_size(size), dp_size=run.dp_cp_size // size) for size in sizes]
    dynamic = [replace(run.with_cp_size(run.cp_size), dynamic_cp=True)] if knows_exchange else []
    settings: list[_Setting] = []
    with progress("planning other settings", total=len(caps) * (len(static) + len(dynamic))) as show:
        for index, (topology, size) in enumerate(itertools.product([*static, *dynamic], caps)):
            show(index)
            flags = f"--use-dynamic-batch-size --max-tokens-per-gpu {size} --balance-data --balance-cost flops"
            flags += " --balance-dynamic-cp" * topology.dynamic_cp
            policy = Policy("", flags, costs.planning("seconds", topology), dynamic_cp=topology.dynamic_cp)
            planner = replace(
                comparison, costs=costs, topology=replace(topology, dynamic_cp=False), limits=Limits(size)
            )
            if problems(planner.options(policy)):
                continue
            batches = recorded_batches(record, steps=len(as_it_ran.steps), dp_size=topology.dp_size).steps
            result = planner.judge(policy, list(planner.plan(policy, batches)))
            if _tokens_per_gpu(result) <= room:
                settings.append(_Setting(topology, size, result.speedup(as_it_ran)))
    return settings


def _tokens_per_gpu(result: PolicyResult) -> int:
    topology = result.info.topology
    return max(step.peak_tokens for step in result.metrics) // (1 if topology.dynamic_cp else topology.cp_size)
