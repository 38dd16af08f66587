"""The ablation as JSON, for programs, and as Markdown, for people: what was expected, and what came out."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.markdown import table
from benchmarks.planner.cost_ways import COST_WAYS
from benchmarks.planner.device_rates import DeviceRates
from benchmarks.planner.losses import Loss
from benchmarks.planner.report import Header, header_lines
from benchmarks.planner.setups import Setup
from benchmarks.results_file import page_of, write_results
from megatron_balance import ModelShape


@dataclass(frozen=True)
class Ablation:
    """All losses of one run.

    Attributes:
        header: what they were made with.
        setups: the runs that were planned.
        devices: the reference devices, in turn.
        losses: one for each setup, length set, device and way.
    """

    header: Header
    setups: Sequence[Setup]
    devices: Sequence[DeviceRates]
    losses: Sequence[Loss]

    def of(self, *, device: str | None = None, way: str | None = None, setup: str | None = None) -> list[Loss]:
        """The losses that are of all that is named."""
        return [
            loss
            for loss in self.losses
            if device in (None, loss.device) and way in (None, loss.way) and setup in (None, loss.setup)
        ]


def write_ablation(ablation: Ablation, out: Path) -> None:
    """Writes ablation.md and ablation.json into a folder."""
    content = {
        "header": asdict(ablation.header),
        "setups": [setup.name for setup in ablation.setups],
        "devices": [asdict(device) for device in ablation.devices],
        "losses": [_loss_fields(loss) for loss in ablation.losses],
    }
    sections = (_head, _outcome, _tables, _by_lengths)
    lines = [line for section in sections for line in section(ablation)]
    write_results("ablation", content, report=lambda _: page_of(lines), out=out)


def _loss_fields(loss: Loss) -> dict[str, Any]:
    """A loss for JSON; a millionth is finer than plans differ."""
    rounded = {name: [round(value, 6) for value in getattr(loss, name)] for name in ("losses", "over_bound")}
    return {**asdict(loss), **rounded, "mean": round(loss.mean, 6), "worst": round(loss.worst, 6)}


def _head(ablation: Ablation) -> list[str]:
    return [
        "# What a wrong cost model loses",
        "",
        *header_lines(ablation.header),
        "Every batch is planned by this package with each cost model in turn, and each plan is timed by a device that",
        "is taken as the truth. **Loss**: step time over that of the plan made with the truth, less one. Losses are",
        "in percent, `mean / worst` over batches. The last row of a table is for scale: how far the plan",
        "made with the truth is itself above a bound that no plan can beat.",
        "",
        "Devices named *calibration* were measured: a calibration's seconds, divided by its model's FLOPs, give",
        "rates that are carried over to each setup's model. They hold for a model of the width that was measured; a",
        "narrow one spends more on what FLOPs leave out. The others are assumed: 400 TFLOP/s in GEMMs, attention",
        "faster or slower, 0.3 ms a layer in every micro-batch, 5 µs a layer for every sequence. Tokens and heads are",
        "spread over tensor-parallel ranks; fixed times are not.",
        "",
        "For Qwen3-4B: from which length on a sample's attention takes longer than the rest of it, and for how many",
        "tokens a micro-batch's fixed time would do.",
        "",
        table(
            "device | measured | attention takes over from | fixed time",
            map(_device_cells, ablation.devices),
            align="llrr",
        ),
        "",
    ]


def _device_cells(device: DeviceRates) -> tuple[str, ...]:
    seconds = device.calibration(ModelShape.preset("Qwen3-4B"))
    crossover = f"{seconds.linear / seconds.quadratic:,.0f} tokens" if seconds.quadratic else "never"
    fixed = f"{seconds.per_microbatch / seconds.linear:,.0f} tokens" if seconds.linear else "–"
    return device.name, "yes" if device.measured else "no", crossover, fixed


def _outcome(ablation: Ablation) -> list[str]:
    """Expectations written before the run, beside what the run gave."""
    flops, approximate = _mean(ablation.of(way="FLOPs")), _mean(ablation.of(way=_APPROXIMATE))
    at_par = [device.name for device in ablation.devices if "at GEMM speed" in device.name]
    twice_off = [device.name for device in ablation.devices if "half" in device.name or "twice" in device.name]
    off = [loss for name in twice_off for loss in ablation.of(device=name, way="FLOPs")]
    par = [loss for name in at_par for loss in ablation.of(device=name, way="FLOPs")]
    rows = [
        (
            "approximate and exact FLOPs are alike: 20.7 % and 21.2 % less train time in the pull request",
            f"mean loss {approximate:.2%} and {flops:.2%}, over everything",
        ),
        (
            "a ratio of linear to quadratic cost that is off by 2x costs up to 7 %",
            f"FLOPs lose {_mean(off):.2%} on average, {max(map(_worst, off), default=0.0):.2%} at worst, where it is; "
            f"{_mean(par):.2%} and {max(map(_worst, par), default=0.0):.2%} where only fixed times are missing",
        ),
        ("tokens lose most", _ranking(ablation)),
        (
            "a wrong cost model costs more than the planner's own error",
            f"the planner leaves {_planner(ablation):.2%}",
        ),
    ]
    return ["## Expected, and what came out", "", table("expected | came out", rows, align="ll"), ""]


_APPROXIMATE = next(way for way in COST_WAYS if way.startswith("coeff"))


def _ranking(ablation: Ablation) -> str:
    """Ways by falling mean loss."""
    means = {way: _mean(ablation.of(way=way)) for way in COST_WAYS}
    return "; ".join(f"{way} {means[way]:.2%}" for way in sorted(means, key=lambda way: -means[way]))


def _planner(ablation: Ablation) -> float:
    return statistics.fmean(ratio - 1 for loss in ablation.losses for ratio in loss.over_bound)


def _tables(ablation: Ablation) -> list[str]:
    lines: list[str] = []
    names = [setup.name for setup in ablation.setups]
    columns = " | ".join(["planned with", *(f"{setup.name} ({setup.objective})" for setup in ablation.setups)])
    for device in ablation.devices:
        rows = [
            [way, *(_cell(ablation.of(device=device.name, way=way, setup=name)) for name in names)] for way in COST_WAYS
        ]
        rows.append([f"{device.name} (the truth)", *["0"] * len(names)])
        bounds = [
            statistics.fmean(
                ratio - 1 for loss in ablation.of(device=device.name, setup=name) for ratio in loss.over_bound
            )
            for name in names
        ]
        rows.append(["*its own plan above the bound*", *(f"{100 * bound:.2f}" for bound in bounds)])
        lines += [f"## Truth: {device.name}", "", table(columns, rows), ""]
    return lines


def _by_lengths(ablation: Ablation) -> list[str]:
    """Mean losses by length set: which lengths make a cost model matter."""
    rows: list[list[str]] = []
    for setup in ablation.setups:
        for name in setup.length_names:
            of_set = [
                [loss for loss in ablation.of(way=way, setup=setup.name) if loss.lengths == name] for way in COST_WAYS
            ]
            rows.append([setup.name, name, *(f"{100 * _mean(losses):.2f}" for losses in of_set)])
    columns = " | ".join(["setup", "lengths", *COST_WAYS])
    means = table(columns, rows, align="ll" + "r" * len(COST_WAYS))
    return ["## By length set", "", "Mean over devices, percent.", "", means]


def _cell(losses: Sequence[Loss]) -> str:
    return f"{100 * _mean(losses):.2f} / {100 * max(map(_worst, losses)):.2f}"


def _mean(losses: Iterable[Loss]) -> float:
    values = [value for loss in losses for value in loss.losses]
    return statistics.fmean(values) if values else 0.0


def _worst(loss: Loss) -> float:
    return loss.worst
