"""Recommends a policy, in a few sentences, from the plans of a comparison.

    1. of the policies that are not slower than stock, those that keep every micro-batch under the token cap, where
       there are any
    2. of these at one context-parallel size, the one with the fewest flags within WORTH of the fastest
    3. dynamic CP, if it gains DYNAMIC_WORTH more, or is alone in keeping under the cap

Invariants: the speed and the cap in the text are those of the printed flags, as planned; no policy changes the order of
the data.
"""

from __future__ import annotations

from collections.abc import Sequence

from megatron_balance.cli.policies import PolicyResult

WORTH = 0.01
"""A policy must gain at least this fraction to be worth its flags."""

DYNAMIC_WORTH = 0.05
"""Dynamic CP must gain at least this fraction over the best policy at one size, because bandwidths are assumed."""

NOTABLE_FLOOR = 1.01
"""Single-sample floors up to this multiple of a rank's even share are not mentioned."""


def recommend(results: Sequence[PolicyResult]) -> tuple[PolicyResult, list[str]]:
    """Choose a policy, and say why. `results`: stock and packed first, then by rising number of flags."""
    stock, packed = results[0], results[1]
    allowed = [result for result in results if result.seconds <= stock.seconds]
    fitting = [result for result in allowed if result.fits] or allowed
    at_one_size = [result for result in fitting if not result.policy.dynamic_cp]
    dynamic = [result for result in fitting if result.policy.dynamic_cp]
    fastest = min((result.seconds for result in at_one_size), default=float("inf"))
    if dynamic and dynamic[0].seconds < fastest * (1 - DYNAMIC_WORTH):
        chosen = dynamic[0]
    else:
        chosen = next(result for result in at_one_size if result.seconds * (1 - WORTH) <= fastest)
    sentences = [_use(chosen, stock=stock, packed=packed), *_on_cap(chosen, results=results)]
    best = min((result for result in results if not result.policy.dynamic_cp), key=lambda result: result.seconds)
    if chosen.policy.dynamic_cp:
        gain = chosen.speedup(best)
        sentences.append(f"It is {gain:.2f}x as fast as {best.policy.name}. doctor -- FLAGS names what it excludes.")
    floor = max(step.single_sample_floor for step in chosen.judged.metrics)
    if not chosen.policy.dynamic_cp and floor > NOTABLE_FLOOR:
        sentences.append(
            f"One sample costs up to {floor:.2f}x a rank's even share, and no plan at one context-parallel size takes "
            "less time than it: take more samples a step, or cut it."
        )
    if chosen.setting.cost_name == "tokens":
        sentences.append("Judged by tokens alone: with --model, --balance-by-flops is compared as well.")
    return chosen, sentences


def _use(chosen: PolicyResult, *, stock: PolicyResult, packed: PolicyResult) -> str:
    if not chosen.policy.flags:
        return f"Leave balancing off: no policy gains {WORTH:.0%} or more on these lengths and ranks."
    against = "" if chosen is packed else f", {chosen.speedup(packed):.2f}x that of packing alone"
    return f"Use {chosen.policy.flags}. Expect {chosen.speedup(stock):.2f}x the speed of stock{against}."


def _on_cap(chosen: PolicyResult, *, results: Sequence[PolicyResult]) -> list[str]:
    """Samples above the cap, and what holds them."""
    topology, limits = results[0].setting.topology, results[0].setting.limits
    held = (limits.max_tokens_per_gpu or 0) * topology.cp_size
    lengths = [topology.padded_seq_len(step.segments) for step in results[0].steps]
    num_over, longest = sum(int((tokens > held).sum()) for tokens in lengths), max(int(max(one)) for one in lengths)
    if not num_over:
        return []
    over = f"{num_over} samples are longer than the cap, the longest with {longest} tokens"
    if chosen.fits:
        return [f"{over}: only {chosen.policy.name} keeps every micro-batch under it."]
    remedy = (
        f"raise --max-tokens-per-gpu to {-(-longest // topology.cp_size)} if memory holds that, or cut them at {held}"
    )
    slower = [result for result in results if result.fits]
    if slower:
        speed = slower[0].speedup(results[0])
        remedy += f"; {slower[0].policy.name} keeps under the cap, at {speed:.2f}x the speed of stock"
    return [f"{over}, and run alone above it: {remedy}."]
