"""Recommends a policy, and says why in sentences.

1. of the policies at one context-parallel size, the one with the fewest flags within WORTH of the fastest
2. dynamic CP, if it gains DYNAMIC_WORTH more, because bandwidths are assumed; WORTH where they were measured
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from megatron_balance.cli.policies import Comparison, PolicyResult
from megatron_balance.record import RunRecord

WORTH = 0.01  # a policy must gain this fraction to be worth its flags
DYNAMIC_WORTH = 0.05  # dynamic CP over one size, where bandwidths are assumed


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
