"""Recommends a policy, and says why in sentences.

1. of the policies at one context-parallel size, the one with the fewest flags within WORTH of the fastest
2. dynamic CP, if it gains DYNAMIC_WORTH more, because bandwidths are assumed; WORTH where they were measured
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from megatron_balance.cli.costs import CompareCosts
from megatron_balance.cli.policies import Comparison, Policy, PolicyResult
from megatron_balance.cli.terminal import show_progress
from megatron_balance.errors import BalanceError
from megatron_balance.mcore.setup.rules import problems
from megatron_balance.record import RunRecord
from megatron_balance.record.fit import fit_record
from megatron_balance.topology import Limits

WORTH = 0.01  # a policy must gain this fraction to be worth its flags
DYNAMIC_WORTH = 0.05  # dynamic CP over one size, where bandwidths are assumed
SETTING_SAMPLES = 2**10  # of a record, that other settings are planned for


def recommend(results: Sequence[PolicyResult], *, costs: CompareCosts) -> PolicyResult:
    """Choose a policy. `results`: stock first, then by rising number of flags."""
    worth = DYNAMIC_WORTH if costs.assumes_bandwidth else WORTH
    static = [result for result in results if not result.policy.dynamic_cp and not result.policy.shares]
    best = min(static, key=lambda result: result.time)
    for result in results:
        if result.policy.dynamic_cp and result.time < best.time * (1 - worth):
            return result
    return next(result for result in static if result.time * (1 - WORTH) <= best.time)


def reasons(
    chosen: PolicyResult, *, results: Sequence[PolicyResult], comparison: Comparison, record: RunRecord | None
) -> Iterator[str]:
    """Why a policy is recommended, and what to mind, in sentences."""
    stock, packed = results[0], results[min(1, len(results) - 1)]
    if chosen is stock:
        yield f"Leave balancing off: no policy gains {WORTH:.0%} or more on these lengths and ranks."
    else:
        measured = [step for step in record.steps if step.is_measured] if record is not None else []
        waits = sum(step.exposed_seconds for step in measured)
        overhead = "an unknown time"
        if measured:
            part = waits / (waits + sum(float(step.seconds.sum(axis=1).max()) for step in measured))
            overhead = f"at least {part:.1%} of the time (measured: plans and samples, without the optimizer)"
        yield (
            f"At most {chosen.speedup(stock):.2f}x the speed of stock, {chosen.speedup(packed):.2f}x that of packing "
            f"alone, in forward and backward passes. Beside them a step spends {overhead}."
        )
        yield comparison.command(chosen.policy)
        yield "or --balance in place of the last flags: it enables every feature that no rule excludes."
    unavoidable = packed.mean("unavoidable_waiting")
    if unavoidable > WORTH:
        yield (
            f"At this context-parallel size GPUs wait {unavoidable:.0%} of the time or more, whatever the plan: a "
            "sample costs more than a rank's share. Dynamic CP, more samples a step or shorter ones help."
        )
    for result in results:
        if result.policy.shares:
            yield (
                f"--balance-share-prefixes: {result.sharing}. At most {result.speedup(chosen):.2f}x the speed of "
                f"{chosen.policy.name}; no GPU has run it."
            )
    num_ranks = chosen.info.topology.dynamic_cp_sizes[-1]  # that may share a sequence
    lengths = np.concatenate([step.segments for step in packed.steps])
    padded = chosen.info.topology.with_cp_size(num_ranks).padded_seq_len(lengths)
    cap = num_ranks * (comparison.limits.max_tokens_per_gpu or 0)
    if chosen is not stock and (num_over := int((padded > cap).sum())):
        yield (
            f"{num_over} of {lengths.size} samples are longer than the cap of {cap} tokens and run alone above it, the "
            f"longest with {lengths.max()}: --max-tokens-per-gpu {-(-int(padded.max()) // num_ranks)} holds it, if "
            f"memory does; else cut them at {cap}."
        )


def advise_settings(record: RunRecord, *, comparison: Comparison) -> Iterator[str]:
    """Other caps and context-parallel sizes on the GPUs of a record, by its own seconds and its measured cap.

    The ranks and the cap of the run come first, then smaller caps before larger ones; each must gain over those before.
    """
    run, cap = record.info.topology, record.info.limits.max_tokens_per_gpu
    if cap is None or not any(step.is_measured for step in record.steps):
        return
    try:
        fit, calibration = fit_record(record)
    except BalanceError as error:
        yield f"Other caps and context-parallel sizes are not compared: {error}"
        return
    costs = replace(comparison.costs, tflops=None, calibration=calibration)
    comparison, recorded = replace(comparison, costs=costs), [step for step in record.steps if step.lengths.size]
    recorded = recorded[: max(SETTING_SAMPLES // recorded[0].lengths.size, 1)]
    policy = Policy("as it ran", "as it ran", record.info.cost_model, dynamic_cp=run.dynamic_cp)
    as_it_ran = comparison.judge(policy, recorded)
    room = max(_tokens_per_gpu(as_it_ran), record.measured_cap or cap)
    batches = [replace(step, home_ranks=None) for step in recorded]  # there may be other ranks, and samples move
    one_size, topologies = run.with_cp_size(run.cp_size), [run]
    if knows_exchange := costs.knows_exchange(replace(run, dynamic_cp=True)):
        sizes = [size for size in (1, 2, 4, 8, 16) if run.dp_cp_size % size == 0]
        topologies += [replace(one_size, cp_size=size, dp_size=run.dp_cp_size // size) for size in sizes]
        topologies.append(replace(one_size, dynamic_cp=True))
    limits = sorted({cap // 2, cap, 2 * cap, record.measured_cap or cap}, key=lambda limit: (limit != cap, limit))

    yield f"On the same GPUs, by the seconds that are fitted to this record (off by {fit.error:.1%}), at most:"
    speed = 1.0
    for topology, limit in itertools.product(dict.fromkeys(topologies), limits):
        if not 0 < limit <= room:
            continue
        changes = [f"--max-tokens-per-gpu {limit}"] * (limit != cap)
        changes += [f"--context-parallel-size {topology.cp_size}"] * (topology.cp_size != run.cp_size)
        switch = "--balance-dynamic-cp" if topology.dynamic_cp else "--no-balance-dynamic-cp"
        changes += [switch] * (topology.dynamic_cp != run.dynamic_cp)
        show_progress(f"planning {' '.join(changes)}")
        flags = f"--use-dynamic-batch-size --max-tokens-per-gpu {limit} --balance-data --balance-cost flops"
        flags += " --balance-dynamic-cp" * topology.dynamic_cp
        policy = Policy("", flags, costs.on(topology).model, dynamic_cp=topology.dynamic_cp)
        setting = replace(comparison, topology=replace(topology, dynamic_cp=False), limits=Limits(limit))
        if problems(setting.options(policy)):
            continue
        result = setting.judge(policy, list(setting.plan(policy, batches)))
        worth = DYNAMIC_WORTH if topology.dynamic_cp and costs.assumes_bandwidth else WORTH
        if _tokens_per_gpu(result) <= room and result.speedup(as_it_ran) > speed * (1 + worth):
            speed = result.speedup(as_it_ran)
            yield f"  {speed:.2f}x as fast as it ran: {' '.join(changes) or '--balance-cost with the seconds of fit'}"
    show_progress()
    if speed == 1.0:
        yield f"  no other cap or context-parallel size gains {WORTH:.0%} or more."
    yield (
        "Not measured: efficiency at other sizes, which is taken to be that of the run, and the bandwidth between "
        "context-parallel ranks, unless they exchanged in it."
    )
    if record.measured_cap is None:
        yield f"Memory was not measured: no more than {room} tokens per GPU, which ran, are compared."
    if not knows_exchange:
        yield "With --model other context-parallel sizes are compared."
    if record.info.environment.get("recompute") == "full":
        yield (
            "Try to do without --recompute-granularity full: it repeats the forward pass, up to a quarter of a step. "
            "Activations then take up to 18 times the memory per token: lower --max-tokens-per-gpu, and share "
            "samples by --context-parallel-size, --balance-dynamic-cp or --tensor-model-parallel-size 2."
        )


def _tokens_per_gpu(result: PolicyResult) -> int:
    topology = result.info.topology
    return max(step.peak_tokens for step in result.metrics) // (1 if topology.dynamic_cp else topology.cp_size)
