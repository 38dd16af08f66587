"""Recommends a policy, in a few sentences, from the figures of a comparison.

    1. the policy with the fewest flags that is within WORTH of the fastest
    2. stock, if that gains nothing
    3. dynamic CP, if it gains DYNAMIC_WORTH more; with the reasons
    4. if samples run alone above the cap: a cap or a context-parallel size that holds the longest
    5. if one sample bounds the step: that it does

Invariant: every number comes from a plan.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_balance.cli.comparison.policies import PolicyResult
from megatron_balance.cli.comparison.results import Comparison, PolicyMeans, Question

WORTH = 0.01
"""A policy must gain at least this fraction to be worth its flags."""

DYNAMIC_WORTH = 0.05
"""Dynamic CP must gain at least this fraction over the best policy at one size: bandwidths are assumed, and predicted
gains differed by up to this much from training (docs/measuring.md, the quickstart)."""

NOTABLE_FLOOR = 1.01
"""Single-sample floors up to this multiple of a rank's even share are not mentioned."""

CAP_MULTIPLE = 256
"""Recommended caps are multiples of this many tokens."""

MOST_CAP_GROWTH = 2
"""Largest recommended cap, as a multiple of the present one."""


@dataclass(frozen=True)
class Recommendation:
    """The recommended policy and its gains.

    Attributes:
        policy: its name.
        flags: training flags that select it; empty for stock.
        objective: the objective it was planned for.
        max_tokens_per_gpu: the cap to set.
        speedup: over stock.
        speedup_over_packed: over packing what each rank loaded.
        floor_worst: single-sample floor of the worst step.
        floor_mean: mean single-sample floor over the steps.
        dynamic_cp_speedup: dynamic CP over the best policy at one size; None if it was not planned.
        sentences: the recommendation as text.
    """

    policy: str
    flags: str
    objective: str
    max_tokens_per_gpu: int
    speedup: float
    speedup_over_packed: float
    floor_worst: float
    floor_mean: float
    dynamic_cp_speedup: float | None
    sentences: tuple[str, ...]


def recommend(comparison: Comparison, *, question: Question, results: Sequence[PolicyResult]) -> Recommendation:
    """Choose a policy and write the sentences.

    Args:
        comparison: all policies.
        question: plans the same batches at other sizes.
        results: candidates, stock and packed first, then by rising number of flags.
    """
    setting = comparison.setting
    at_one_size = [result for result in results if not result.policy.dynamic_cp]
    fastest = min(comparison.seconds(result) for result in at_one_size)
    fixed = next(result for result in at_one_size if comparison.seconds(result) * (1 - WORTH) <= fastest)
    chosen, gain = fixed, None
    for result in results:
        if result.policy.dynamic_cp:
            gain = comparison.speedup(result, over=fixed)
            chosen = result if gain > 1 / (1 - DYNAMIC_WORTH) else fixed
    figures = comparison.figures(chosen)
    over_packed = comparison.speedup(chosen, over=results[1])
    cap, on_cap = (setting.limits.max_tokens_per_gpu or 0, []) if chosen.policy.dynamic_cp else _cap(comparison)
    floors = [step.single_sample_floor for step in fixed.metrics]
    sentences = [_use(figures, objective=setting.objective, cap=cap, over_packed=over_packed), *on_cap]
    if chosen is not fixed:
        sentences.append(_on_dynamic(comparison, chosen=chosen, fixed=fixed, floor=max(floors)))
    if max(floors) > NOTABLE_FLOOR:
        sentences.append(_on_floor(floors, at_one_size=chosen is not fixed))
    if comparison.setting.cost_name == "tokens":
        sentences.append("By tokens alone; with --model, --balance-by-flops can be judged as well.")
    return Recommendation(
        policy=figures.name,
        flags=figures.flags,
        objective=setting.objective,
        max_tokens_per_gpu=cap,
        speedup=figures.speedup,
        speedup_over_packed=over_packed,
        floor_worst=max(floors),
        floor_mean=math.fsum(floors) / len(floors),
        dynamic_cp_speedup=gain,
        sentences=tuple(sentences),
    )


def _use(figures: PolicyMeans, *, objective: str, cap: int, over_packed: float) -> str:
    if not figures.flags:
        return f"Leave balancing off: no policy gains {WORTH:.0%} or more on these lengths and ranks."
    flags = " ".join(
        str(cap) if before == "--max-tokens-per-gpu" else flag
        for before, flag in zip(["", *figures.flags.split()], figures.flags.split(), strict=False)
    )
    against = f", {over_packed:.2f}x packing alone" if figures.name != "packed" else ""
    return f"Use {flags} (objective {objective}, cap {cap}). Expect {figures.speedup:.2f}x the speed of stock{against}."


def _on_dynamic(comparison: Comparison, *, chosen: PolicyResult, fixed: PolicyResult, floor: float) -> str:
    """The gain of dynamic CP, with its reasons."""
    gain, free = (comparison.speedup(chosen, over=fixed, free=free) for free in (False, True))
    cp_size = comparison.setting.topology.cp_size
    reasons: list[str] = []
    if floor > NOTABLE_FLOOR:
        reasons.append("several ranks share the samples that are longer than a rank's share")
    mean_size = chosen.mean(lambda figures: figures.mean_cp_size)
    if mean_size < cp_size:
        reasons.append(f"{mean_size:.1f} ranks share a token on average, not {cp_size}, and receive less")
    because = f": {', and '.join(reasons)}" if reasons else ""
    return (
        f"Dynamic CP is {gain:.2f}x {fixed.policy.name} ({free:.2f}x were communication free){because}. "
        "Options that it excludes: docs/options.md."
    )


def _cap(comparison: Comparison) -> tuple[int, list[str]]:
    """The present cap, or the one that the longest sample needs, with the reason."""
    topology, limits = comparison.setting.topology, comparison.setting.limits
    present = limits.max_tokens_per_gpu
    assert present is not None, "compare plans under a token cap"
    held = present * topology.cp_size
    padded = [topology.padded_seq_len(batch.segment_lengths) for batch in comparison.batches]
    longest, num_over = max(int(tokens.max()) for tokens in padded), sum(int((t > held).sum()) for t in padded)
    if not num_over:
        return present, []
    runs = f"{num_over} samples are longer than the cap and run alone above it, the longest with {longest} tokens"
    needed = -(-longest // (topology.cp_size * CAP_MULTIPLE)) * CAP_MULTIPLE
    if needed <= MOST_CAP_GROWTH * present:
        return needed, [f"{runs}: memory must hold that in any case, so a cap of {needed} takes no more."]
    cp_size = topology.cp_size
    while present * cp_size < longest:
        cp_size *= 2
    return present, [f"{runs}: without memory for it, CP {cp_size} holds it under the cap, or cut it at {held} tokens."]


def _on_floor(floors: Sequence[float], *, at_one_size: bool) -> str:
    """The cost of the largest sample. `at_one_size`: dynamic CP is recommended, which the floor does not bound."""
    return (
        f"One sample outweighs a rank's share, {max(floors):.2f}x in the worst step and "
        f"{math.fsum(floors) / len(floors):.2f}x on average, and no plan {'at one size ' * at_one_size}goes below "
        "that: share it by context parallelism, cut it, or take more samples a step."
    )
