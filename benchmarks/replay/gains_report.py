"""Writes the predicted gains as JSON and Markdown, and the length sets that reach the published ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks.markdown import table
from benchmarks.planner.report import Header, header_lines
from benchmarks.replay.gains import NUM_BATCHES, Gain
from benchmarks.replay.setups import ReplaySetup
from benchmarks.results_file import page_of, write_results


def write_gains(gains: Sequence[Gain], *, setups: Sequence[ReplaySetup], header: Header, out: Path) -> None:
    """Writes gains.md and gains.json into a folder."""
    content = {
        "header": asdict(header),
        "goals": {setup.name: setup.goal for setup in setups},
        "gains": [
            {**asdict(gain), "values": [round(value, 6) for value in gain.values], "mean": round(gain.mean, 6)}
            for gain in gains
        ],
    }
    judges = list(dict.fromkeys(gain.judge for gain in gains))
    lines = [*_head(header), *_reached(gains, setups=setups)]
    for judge in judges:
        lines += _table([gain for gain in gains if gain.judge == judge], judge=judge, setups=setups)
    write_results("gains", content, report=lambda _: page_of(lines), out=out)


def _head(header: Header) -> list[str]:
    return [
        "# Which lengths the published gains need",
        "",
        *header_lines(header),
        "Predicted, not measured: the part of the step time of first-fit + KK on tokens (slime's `--balance-data`)",
        f"that this package's plan saves, in percent, mean over {NUM_BATCHES} batches. Plans are made and judged by",
        "FLOPs, or by the seconds of a device (those of ablation.md), for the setups as the replay runs them: experts",
        "run where the token is, and wait for the slowest rank like the rest. **Bold** reaches the bar: what slime's",
        "pull request 2017 saved in its own runs, whose lengths are not published.",
        "",
        "Long samples among short ones make a gain, because micro-batches of as many tokens differ in attention: the",
        "more, the slower the device is at attention. And few micro-batches a rank make one: first-fit fills as many",
        "as the tokens need, and halves some where the ranks do not divide them (gsm8k_sft: 3 for 4 ranks).",
        "",
    ]


def _reached(gains: Sequence[Gain], *, setups: Sequence[ReplaySetup]) -> list[str]:
    rows: list[tuple[str, ...]] = []
    for setup in setups:
        of_setup = [gain for gain in gains if gain.setup == setup.name]
        most = max(of_setup, key=lambda gain: gain.mean)
        largest = f"{most.mean:.1%}: {most.lengths} ({most.judge})"
        reached = [gain for gain in of_setup if setup.goal is not None and gain.mean >= setup.goal]
        by_lengths = [
            f"{name} ({', '.join(gain.judge for gain in reached if gain.lengths == name)})"
            for name in dict.fromkeys(gain.lengths for gain in reached)
        ]
        bar = "–" if setup.goal is None else f"{setup.goal:.1%}"
        rows.append((setup.name, bar, "; ".join(by_lengths) or "none", largest))
    columns = "setup | bar | by FLOPs or a device | the largest"
    return ["## Reached by", "", table(columns, rows, align="lrll"), ""]


def _table(gains: Sequence[Gain], *, judge: str, setups: Sequence[ReplaySetup]) -> list[str]:
    bars = ["" if setup.goal is None else f" (bar {100 * setup.goal:.1f})" for setup in setups]
    heads = [f"{setup.name}{bar}" for setup, bar in zip(setups, bars, strict=True)]
    rows: list[tuple[str, ...]] = []
    for name in dict.fromkeys(gain.lengths for gain in gains):
        cells: list[str] = []
        for setup in setups:
            (mean,) = (gain.mean for gain in gains if (gain.setup, gain.lengths) == (setup.name, name))
            bold = "**" if setup.goal is not None and mean >= setup.goal else ""
            cells.append(f"{bold}{100 * mean:.1f}{bold}")
        rows.append((name, *cells))
    return [f"## By {judge}", "", table(" | ".join(["lengths", *heads]), rows), ""]
