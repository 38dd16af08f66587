"""The page of measured and predicted gains."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

from benchmarks.markdown import table
from benchmarks.results_file import page_head, versions_of

LEAST_GAIN = 1.2
"""Over the better static size, that is aimed at."""

MOST_OFF = 0.05
"""Between measured and predicted gain, that is aimed at."""


def report(result: Mapping[str, Any]) -> str:
    """The page, from the content of the results file."""
    policies: Mapping[str, Mapping[str, Any]] = result["policies"]
    rows = [
        (
            name,
            f"{statistics.median(of_one['cpu_seconds']):.3f}",
            f"{min(of_one['cpu_seconds']):.3f} to {max(of_one['cpu_seconds']):.3f}",
            f"{statistics.median(of_one['alone_cpu_seconds']):.3f}",
            f"{statistics.median(of_one['seconds']):.2f}",
            f"{of_one['predicted_seconds']:.3f}",
            f"{of_one['mean_cp_size']:.2f}",
            f"{of_one['loss_difference']:.1e}",
        )
        for name, of_one in policies.items()
    ]
    columns = "policy | CPU s | least to most | in a run of its own | wall s | predicted s | mean size | loss off by"
    measured, predicted = gains(policies, "cpu_seconds"), gains(policies, "predicted_seconds")
    better, planned = (min(gain, key=lambda name: gain[name]) for gain in (measured, predicted))
    rounds = list(zip(policies[better]["cpu_seconds"], policies["dynamic"]["cpu_seconds"], strict=True))
    ratios = sorted(static / dynamic for static, dynamic in rounds)
    off = measured[better] - predicted[planned]
    gain_rows = [
        (
            f"over {name}",
            f"{measured[name]:.3f}×",
            f"{predicted[name]:.3f}×",
            f"{measured[name] - predicted[name]:+.3f}",
        )
        for name in measured
    ]
    fit: Mapping[str, float] = result["calibration"]
    return f"""{page_head("Measured gain of dynamic context-parallel sizes", result["command"])}
Four CPU ranks over gloo, fp32, a model of 2 layers, width 64, 4 heads of 32, no grouped queries; a step is 31 samples
of 128 to 640 tokens and one of 8,192. All policies plan with `--balance-data --balance-by-flops` and the same
calibration. Steps take turns between the policies in one process group: {len(rounds)} rounds counted, medians of the
busiest rank's CPU seconds in Megatron's train_step, in which a rank that waits sleeps. The machine has two cores and
did other work besides, so wall seconds say little: four ranks on two cores take as long as all their work together.

{table(columns, rows)}

*In a run of its own*: the policy by itself from the first step on, static ones without dynamic sizes. *Loss off by*:
the largest relative difference of a step between that run and the run in turns. *Predicted*: seconds of the busiest
rank's passes by `torchrun --nproc-per-node 4 -m megatron_balance calibrate`, before training.

## Gain

{table("dynamic sizes | measured | predicted | off by", gain_rows)}

Over the better static size it is {measured[better]:.2f}× measured (over {better}; single rounds {ratios[0]:.2f} to
{ratios[-1]:.2f}; aimed at: {LEAST_GAIN:.1f}×) and {predicted[planned]:.2f}× predicted (over {planned}):
{100 * abs(off):.1f} points apart (aimed at: {100 * MOST_OFF:.0f}).

## Calibration

A micro-batch {fit["per_microbatch"] * 1e3:.3g} ms, a sequence {fit["per_sequence"] * 1e6:.3g} us, a token
{fit["linear"] * 1e6:.3g} us, a squared token {fit["quadratic"] * 1e12:.3g} ps, receiving a token's keys and values
{fit["cp_exchange"] * 1e6:.3g} us. Off by {fit["held_out_error"]:.1%} (median) on micro-batches of one rank that were
not fitted, by {fit["exchange_held_out_error"]:.1%} on those that 2 or 4 ranks share
({fit["exchange_held_out_error_without"]:.1%} without the exchange). {versions_of(result)}.
"""


def gains(policies: Mapping[str, Mapping[str, Any]], key: str) -> dict[str, float]:
    """Seconds of each static policy over those of the dynamic one."""
    median = {name: statistics.median(_listed(of_one[key])) for name, of_one in policies.items()}
    return {name: seconds / median["dynamic"] for name, seconds in median.items() if name != "dynamic"}


def _listed(value: Any) -> list[float]:
    return value if isinstance(value, list) else [value]
