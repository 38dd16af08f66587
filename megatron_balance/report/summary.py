"""Writes the table of figures and the sentences around it: the report as text."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from megatron_balance.planner import ScheduleMetrics
from megatron_balance.report.fit import CostFit
from megatron_balance.report.run_figures import PolicyFigures, RunFigures

NONE = "–"
"""A cell without a value."""


@dataclass(frozen=True)
class Summary:
    """The text of a report.

    Attributes:
        title: policy and hardware.
        facts: ranks, objective, cost, steps, versions: one line each.
        tiles: the main figures: name, value, meaning.
        columns: of the table.
        rows: `[num_rows]` name of a figure, then its value in each column.
        notes: how to read it.
    """

    title: str
    facts: tuple[str, ...]
    tiles: tuple[tuple[str, str, str], ...]
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...]


def summarize(figures: RunFigures, *, fit: CostFit | None) -> Summary:
    """The text of a run's report."""
    policies: list[tuple[str, PolicyFigures]] = [("stock, predicted", figures.stock)]
    if figures.beforehand is not None:
        policies.append(("planned beforehand", figures.beforehand))
    policies.append(("planned", figures.planned))
    device = figures.info.origin.get("device")
    return Summary(
        title=figures.info.policy + (f" on {device}" if device else ""),
        facts=_facts(figures),
        tiles=_tiles(figures, fit=fit),
        columns=("", *(label for label, _ in policies), *(("measured",) if figures.is_measured else ())),
        rows=_rows(figures, policies=[policy for _, policy in policies]),
        notes=_notes(figures),
    )


def amount(value: float, *, unit: str) -> str:
    """A time or a cost with a readable unit: 12.3 ms, 4.56 PFLOP, 8,192 tokens."""
    if math.isnan(value):
        return NONE
    if unit == "tokens":
        return f"{value:,.0f} tokens"
    if value == 0:
        return f"0 {unit}"
    prefixes = {-9: "n", -6: "µ", -3: "m", 0: "", 3: "k", 6: "M", 9: "G", 12: "T", 15: "P", 18: "E", 21: "Z"}
    power = min(max(3 * math.floor(math.log10(abs(value)) / 3), -9), 0 if unit == "s" else 21)
    return f"{value / 10**power:.3g} {prefixes[power]}{unit}"


def _facts(figures: RunFigures) -> tuple[str, ...]:
    info, topology = figures.info, figures.info.topology
    sizes = [f"{name.upper()} {getattr(topology, name + '_size')}" for name in ("dp", "cp", "tp", "pp", "ep")]
    shown = [size for size in sizes if size.startswith("DP") or not size.endswith(" 1")]
    limits = info.limits
    limit = (
        f"{limits.max_tokens_per_gpu:,} tokens per GPU in a micro-batch"
        if limits.max_tokens_per_gpu is not None
        else f"{limits.micro_batch_size} samples in a micro-batch"
    )
    iterations = figures.iterations
    facts = [
        f"{len(iterations):,} step{'s' if len(iterations) > 1 else ''} ({iterations[0]:,} to {iterations[-1]:,})",
        f"{', '.join(shown)}; at most {limit}",
        f"objective {info.objective}, cost in {info.cost_name}",
    ]
    origin = info.origin
    versions = ", ".join(f"{name} {version}" for name, version in origin.get("versions", {}).items())
    facts += [f"measured with {origin['clock']}"] if "clock" in origin and figures.is_measured else []
    return tuple(facts + ([versions] if versions else []))


def _tiles(figures: RunFigures, *, fit: CostFit | None) -> tuple[tuple[str, str, str], ...]:
    stock, planned = figures.stock.imbalance.mean(), figures.planned.imbalance.mean()
    tiles = [
        ("Predicted speed-up", f"{figures.speed_up:.2f}×", "of a step, against the stock sampler"),
        ("Imbalance, stock", f"{stock:.3f}", "predicted, slowest / mean"),
        ("Imbalance, planned", f"{planned:.3f}", "predicted, slowest / mean"),
    ]
    if figures.is_measured:
        measured = float(np.nanmean(figures.measured_imbalance))
        tiles.append(("Imbalance, measured", f"{measured:.3f}", "of micro-batch seconds"))
    if fit is not None:
        tiles.append(("Cost model off by", f"{fit.median_error:.1%}", "median over micro-batches"))
    return tuple(tiles)


def _rows(figures: RunFigures, *, policies: Sequence[PolicyFigures]) -> tuple[tuple[str, ...], ...]:
    unit, measured, seconds = figures.scale.unit, figures.measured_imbalance, figures.measured_seconds
    rows: list[tuple[str, ...]] = []

    def add(name: str, value: Callable[[PolicyFigures], str], *, of_measured: str = NONE) -> None:
        cells = [value(policy) for policy in policies]
        rows.append((name, *cells, *((of_measured,) if figures.is_measured else ())))

    def add_metric(name: str, value: Callable[[ScheduleMetrics], float], *, form: str) -> None:
        add(name, lambda policy: format(np.mean([value(step) for step in policy.metrics]), form))

    known = figures.is_measured
    add(
        "imbalance (slowest / mean), mean",
        lambda policy: f"{policy.imbalance.mean():.3f}",
        of_measured=f"{np.nanmean(measured):.3f}" if known else NONE,
    )
    add(
        "imbalance, worst step",
        lambda policy: f"{policy.imbalance.max():.3f}",
        of_measured=f"{np.nanmax(measured):.3f}" if known else NONE,
    )
    add(
        "step, mean",
        lambda policy: amount(float(policy.times.mean()), unit=unit),
        of_measured=amount(float(np.nanmean(seconds)), unit="s") if known else NONE,
    )
    add_metric("above the lower bound, mean", lambda step: step.over_bound - 1, form="+.2%")
    add_metric("micro-batches of a rank, mean", lambda step: step.num_microbatches, form=".1f")
    add_metric("padding, mean", lambda step: step.padding_fraction, form=".2%")
    if figures.info.limits.max_tokens_per_gpu is not None:
        add(
            "room under the token cap, least",
            lambda policy: f"{min(step.cap_headroom or 0.0 for step in policy.metrics):.1%}",
        )
    add("moved tokens, of all, mean", lambda policy: _moved_part(figures, policy=policy))
    for name in ("plan", "exchange", "exposed"):
        spent = np.array([getattr(step, f"{name}_seconds") for step in figures.record.steps])
        if spent.any():
            what = {"plan": "planning", "exchange": "moving samples", "exposed": "waiting for both"}[name]
            empty = (NONE,) * (len(policies) - 1 + known)
            rows.append((f"{what}, mean", *empty, amount(float(spent.mean()), unit="s")))
    return tuple(rows)


def _moved_part(figures: RunFigures, *, policy: PolicyFigures) -> str:
    """Part of the tokens that moved; unknown where several ranks share a sample, as one loads it and all run it."""
    moved = [step.moved_tokens for step in policy.metrics if step.moved_tokens is not None]
    tokens = sum(int(step.segment_lengths.sum()) for step in figures.record.steps)
    return f"{sum(moved) / max(tokens, 1):.0%}" if len(moved) == len(policy.metrics) else NONE


def _notes(figures: RunFigures) -> tuple[str, ...]:
    per_slot = figures.info.limits.micro_batch_size or 1
    samples = "one sample" if per_slot == 1 else f"{per_slot} samples"
    counted = "the time that ranks wait for one another"
    if figures.info.cost_model.per_microbatch:
        counted += ", and the fixed cost of every micro-batch"
    notes = [
        "Stock is Megatron's own sampler on the same samples: every rank runs the samples it loaded, "
        f"{samples} a micro-batch. Both are judged by the same cost model. The "
        f"predicted speed-up counts {counted}; the padding that packing saves is not in it."
    ]
    if figures.info.topology.dynamic_cp:
        notes.append(
            "Rows are data- and context-parallel ranks; a micro-batch spans the rows of the ranks that share it. Under "
            f"stock {figures.info.topology.cp_size} ranks share every sample, and its bound is that of this size."
        )
    if figures.is_measured:
        notes.append("Micro-batches are measured: a measured step is the busiest rank's sum of them.")
    if figures.info.objective == "microbatch":
        notes.append(
            "Ranks meet in every micro-batch: slots are drawn aligned, waiting inside each. Measured seconds of a "
            "micro-batch include waiting for the others, so the measured imbalance looks smaller than it is."
        )
    if figures.info.topology.pp_size > 1:
        notes.append(
            "Times are those of one pipeline stage. Micro-batches are drawn back to back, and the pipeline's bubble "
            "with the waiting at the end: when each stage is free is not known."
        )
    floor = max(step.single_sample_floor for step in figures.planned.metrics)
    if floor > 1.01:
        notes.append(
            f"In the worst step one sample costs {floor:.2f} times a rank's even share: no plan brings that step's "
            "imbalance below it. More context parallelism, or shorter samples, would."
        )
    if figures.beforehand is not None and not _same_samples(figures):
        notes.append("The plan made beforehand holds other samples than the run's steps.")
    return tuple(notes)


def _same_samples(figures: RunFigures) -> bool:
    assert figures.beforehand is not None
    return all(
        np.array_equal(np.sort(plan.lengths), np.sort(step.lengths))
        for plan, step in zip(figures.beforehand.steps, figures.record.steps, strict=False)
    )
