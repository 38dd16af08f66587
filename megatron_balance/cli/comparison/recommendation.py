"""Recommends a policy, in a few sentences, from the figures of a comparison.

    1. the policy with the fewest flags that is within WORTH of the fastest
    2. stock, if that gains nothing
    3. dynamic CP, if it gains DYNAMIC_WORTH more; with the reasons
    4. if samples run alone above the cap: a cap or a context-parallel size that holds the longest
    5. if one sample bounds the step: the changes that lower this floor, with the gain planned for them

Invariant: every number comes from a plan.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from megatron_balance.cli.comparison.batches import GlobalBatch
from megatron_balance.cli.comparison.policies import PolicyResult
from megatron_balance.cli.comparison.results import Comparison, PolicyMeans, Question
from megatron_balance.planner.floor_advice import FloorAdvice, floor_advice
from megatron_balance.topology import Limits, Topology

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

PLANNED_AGAIN = 8
"""Steps that are planned again to measure the gain of an advice."""


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
        cp_size: context-parallel size that lowers the floor on the same GPUs; None if there is none or no need.
        cp_speedup: additional gain of that size; None if it was not planned.
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
    cp_size: int | None
    cp_speedup: float | None
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
    advice, cp_size, cp_speedup = _floor_advice(comparison, floors, chosen=fixed, question=question)
    if advice is not None:
        sentences += _on_floor(
            advice,
            floor_mean=math.fsum(floors) / len(floors),
            cp_speedup=cp_speedup,
            at_one_size=chosen is not fixed,
            counted=comparison.counts_communication,
        )
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
        cp_size=cp_size,
        cp_speedup=cp_speedup,
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


def _floor_advice(
    comparison: Comparison, floors: list[float], *, chosen: PolicyResult, question: Question
) -> tuple[FloorAdvice | None, int | None, float | None]:
    """Advice for the step with the largest floor, its context-parallel size, and the gain of that size.

    `chosen`: the best policy at one size.
    """
    setting = comparison.setting
    worst = max(range(len(floors)), key=lambda step: floors[step])
    if floors[worst] <= NOTABLE_FLOOR or question.has_images:
        # The advice is to share or cut sequences, which moves no image.
        return None, None, None
    advice = floor_advice(chosen.steps[worst].segment_lengths, cost_model=setting.cost_model, topology=setting.topology)
    if advice.cp_size is None or advice.cp_size == setting.topology.cp_size:
        return advice, None, None
    gain = _gain_of_cp(comparison, cp_size=advice.cp_size, chosen=chosen, question=question)
    return advice, advice.cp_size, gain


def _gain_of_cp(comparison: Comparison, *, cp_size: int, chosen: PolicyResult, question: Question) -> float | None:
    """Speed with more context parallelism on the same GPUs over that without; None where it cannot be planned."""
    topology = comparison.setting.topology
    other = replace(topology, dp_size=topology.dp_size * topology.cp_size // cp_size, cp_size=cp_size)
    if other.dp_size % other.ep_span or not question.costs.holds_at(other):
        return None
    num_steps = min(PLANNED_AGAIN, len(comparison.batches))
    batches = [replace(batch, loaded_by=None) for batch in comparison.batches[:num_steps]]
    now, then = (
        _seconds(question, batches, topology=ranks, limits=comparison.setting.limits, name=chosen.policy.name)
        for ranks in (topology, other)
    )
    return now / then if then else None


def _seconds(
    question: Question, batches: Sequence[GlobalBatch], *, topology: Topology, limits: Limits, name: str
) -> float:
    setting = question.setting(topology, limits=limits)
    policy = next(policy for policy in question.policies(setting) if policy.name == name)
    comparison = question.compare(batches, topology=topology, limits=limits, policies=[policy])
    return comparison.seconds(comparison.results[0])


def _on_floor(
    advice: FloorAdvice, *, floor_mean: float, cp_speedup: float | None, at_one_size: bool, counted: bool
) -> list[str]:
    """Sentences on the single-sample floor: its cost, and the ways to lower it.

    Args:
        advice: for the worst step.
        floor_mean: mean over the steps.
        cp_speedup: of more context parallelism for all samples.
        at_one_size: dynamic CP is recommended, which the floor does not bound.
        counted: `cp_speedup` includes communication.
    """
    plans = "no plan at one size" if at_one_size else "no plan"
    sentences = [
        f"One sample outweighs a rank's share, {advice.floor:.2f}x in the worst step and {floor_mean:.2f}x on average, "
        f"and {plans} goes below that."
    ]
    ways: list[str] = []
    if cp_speedup is not None:
        ways.append(
            f"CP {advice.cp_size} on the same GPUs would lift the floor: {cp_speedup:.2f}x on top, "
            f"its communication {'' if counted else 'not '}counted"
        )
    elif advice.cp_size is not None:
        ways.append(f"CP {advice.cp_size} would lift the floor")
    if advice.fitting_tokens is not None:
        ways.append(f"so would cutting samples at {advice.fitting_tokens} tokens ({advice.num_longer} in that step)")
    if not ways:
        ways.append("more samples a step, or fewer ranks, would lift it")
    text = "; ".join(ways)
    return [*sentences, text[0].upper() + text[1:] + "."]
