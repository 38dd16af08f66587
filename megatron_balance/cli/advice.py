"""Recommends a policy, and says why in sentences.

1. of the policies at one context-parallel size, the one with the fewest flags within WORTH of the fastest
2. dynamic CP, if it gains DYNAMIC_WORTH more, because bandwidths are assumed; WORTH where they were measured
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from megatron_balance.cli.data import recorded_batches
from megatron_balance.cli.policies import Comparison, Policy, PolicyResult
from megatron_balance.cli.terminal import show_progress
from megatron_balance.errors import BalanceError
from megatron_balance.mcore.setup.rules import problems
from megatron_balance.record import RunRecord
from megatron_balance.record.fit import fit_record
from megatron_balance.topology import Limits, Topology

WORTH = 0.01  # a policy must gain this fraction to be worth its flags
DYNAMIC_WORTH = 0.05  # dynamic CP over one size, where bandwidths are assumed
SETTING_SAMPLES = 2**10  # of a record, that other settings are planned for


def recommend(
    results: Sequence[PolicyResult], *, comparison: Comparison, record: RunRecord | None = None
) -> tuple[PolicyResult, list[str]]:
    """Choose a policy, and say why. `results`: stock first, then by rising number of flags."""
    worth = DYNAMIC_WORTH if comparison.costs.assumes_bandwidth else WORTH
    static = [result for result in results if not result.policy.dynamic_cp and not result.policy.shares]
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
    sharing = by_name.get("share-prefixes")
    if sharing is not None:
        gains = [best.time / float(times.sum()) for times in (sharing.times, sharing.times_if_dearer(2))]
        yield (
            f"--balance-share-prefixes: {sharing.sharing}. At most {gains[0]:.2f}x the speed of {best.policy.name}, "
            f"{gains[1]:.2f}x where a pair of attention costs twice as much in such micro-batches; no GPU has run it."
        )
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
    costs = replace(comparison.costs, device=None, calibration=calibration)
    comparison, recorded = replace(comparison, costs=costs), [step for step in record.steps if step.lengths.size]
    recorded = recorded[: max(SETTING_SAMPLES // recorded[0].lengths.size, 1)]
    policy = Policy("as it ran", "as it ran", record.info.cost_model, dynamic_cp=run.dynamic_cp)
    as_it_ran = comparison.judge(policy, recorded)
    room = max(_tokens_per_gpu(as_it_ran), record.measured_cap or cap)
    knows_exchange = costs.knows_exchange(replace(run, dynamic_cp=True))
    sizes = [size for size in (1, 2, 4, 8, 16) if run.dp_cp_size % size == 0] if knows_exchange else [run.cp_size]
    static = [replace(run.with_cp_size(size), dp_size=run.dp_cp_size // size) for size in sizes]
    dynamic = [replace(run.with_cp_size(run.cp_size), dynamic_cp=True)] if knows_exchange else []
    results = list(_results([*static, *dynamic], record=record, comparison=comparison, as_it_ran=as_it_ran, room=room))

    def flags(result: PolicyResult) -> list[str]:
        """Flags that the run did not have."""
        topology, limit = result.info.topology, result.info.limits.max_tokens_per_gpu
        changes = [f"--max-tokens-per-gpu {limit}"] * (limit != cap)
        changes += [f"--context-parallel-size {topology.cp_size}"] * (topology.cp_size != run.cp_size)
        switch = "--balance-dynamic-cp" if topology.dynamic_cp else "--no-balance-dynamic-cp"
        return changes + [switch] * (topology.dynamic_cp != run.dynamic_cp)

    yield f"On the same GPUs, by the seconds that are fitted to this record (off by {fit.error:.1%}), at most:"
    speed, dynamic_worth = 1.0, DYNAMIC_WORTH if costs.assumes_bandwidth else WORTH
    kinds = (
        ([result for result in results if result.info.topology == run], WORTH),
        ([result for result in results if not result.policy.dynamic_cp], WORTH),
        ([result for result in results if result.policy.dynamic_cp], dynamic_worth),
    )
    for kind, worth in kinds:
        fastest = min((result.time for result in kind), default=0.0)
        similar = [result for result in kind if result.time * (1 - WORTH) <= fastest]
        simplest = min(
            similar, key=lambda result: (len(flags(result)), result.info.limits.max_tokens_per_gpu), default=None
        )
        if simplest is not None and simplest.speedup(as_it_ran) > speed * (1 + worth):
            speed = simplest.speedup(as_it_ran)
            changes = " ".join(flags(simplest)) or "--balance-cost seconds.json of megatron-balance fit"
            yield f"  {speed:.2f}x as fast as it ran: {changes}"
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


def _results(
    topologies: Sequence[Topology], *, record: RunRecord, comparison: Comparison, as_it_ran: PolicyResult, room: int
) -> Iterator[PolicyResult]:
    """Plans on these ranks at several caps that no rule refuses, and that put at most `room` tokens on a GPU."""
    cap = record.info.limits.max_tokens_per_gpu or 1
    caps = sorted({size for size in (cap // 2, cap, 2 * cap, record.measured_cap or cap) if 0 < size <= room})
    for topology, size in itertools.product(topologies, caps):
        flags = f"--use-dynamic-batch-size --max-tokens-per-gpu {size} --balance-data --balance-cost flops"
        flags += " --balance-dynamic-cp" * topology.dynamic_cp
        show_progress(f"planning {flags}")
        policy = Policy("", flags, comparison.costs.on(topology).model, dynamic_cp=topology.dynamic_cp)
        setting = replace(comparison, topology=replace(topology, dynamic_cp=False), limits=Limits(size))
        if problems(setting.options(policy)):
            continue
        batches = recorded_batches(record, steps=len(as_it_ran.steps), dp_size=topology.dp_size).steps
        result = setting.judge(policy, list(setting.plan(policy, batches)))
        if _tokens_per_gpu(result) <= room:
            yield result
    show_progress()


def _tokens_per_gpu(result: PolicyResult) -> int:
    topology = result.info.topology
    return max(step.peak_tokens for step in result.metrics) // (1 if topology.dynamic_cp else topology.cp_size)
