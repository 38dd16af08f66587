"""The results as JSON, for programs, and as Markdown, for people."""

from __future__ import annotations

import contextlib
import datetime
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from benchmarks.markdown import table
from benchmarks.planner.growth import LARGE, GrowthPoint, growth_exponent
from benchmarks.planner.measure import Row
from benchmarks.planner.ratios import SpeedRatio
from benchmarks.planner.setups import Setup
from benchmarks.results_file import page_of, write_results


@dataclass(frozen=True)
class Header:
    """Command, machine and versions of the figures.

    Attributes:
        command: the command, from the root of the repository.
        date: day of the run.
        cpu: model of the processor.
        num_cores: cores this process may use.
        versions: of Python, numpy, this package and the wheels of others, where installed.
        lengths: where the lengths come from.
    """

    command: str
    date: str
    cpu: str
    num_cores: int
    versions: dict[str, str]
    lengths: str


@dataclass(frozen=True)
class Results:
    """All figures of one run.

    Attributes:
        header: command, machine and versions.
        setups: the runs that were planned.
        rows: one for each planner on each setup.
        speed_ratios: our plan against verl's.
        growth: time of our plan by number of samples.
        plot: name of the growth plot beside the results; None where it was not drawn.
    """

    header: Header
    setups: Sequence[Setup]
    rows: Sequence[Row]
    speed_ratios: Sequence[SpeedRatio]
    growth: Sequence[GrowthPoint]
    plot: str | None


def make_header(*, command: str, real_lengths: bool) -> Header:
    """The header of a run on this machine, today."""
    from megatron_balance.runtime.environment import processor  # imports torch

    python = {"python": platform.python_version()}
    source = "real, from files" if real_lengths else "drawn from the fits built into the package"
    return Header(
        command=command,
        date=datetime.datetime.now(tz=datetime.timezone.utc).date().isoformat(),
        cpu=processor(),
        num_cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        versions=python | installed_versions(("numpy", "megatron-balance", "verl", "areal")),
        lengths=f"{source}; samples longer than a micro-batch are left out",
    )


def header_lines(header: Header) -> list[str]:
    """The header in Markdown."""
    return [
        "Made by the command below; do not edit.",
        "",
        f"    {header.command}",
        "",
        f"- {header.date}, {header.cpu}, {header.num_cores} cores",
        f"- {', '.join(f'{name} {number}' for name, number in header.versions.items())}",
        f"- lengths: {header.lengths}",
        "",
    ]


def installed_versions(packages: Sequence[str]) -> dict[str, str]:
    """Versions of packages; what is not installed is left out."""
    versions: dict[str, str] = {}
    for name in packages:
        with contextlib.suppress(PackageNotFoundError):
            versions[name] = version(name)
    return versions


def write_planner(results: Results, out: Path) -> None:
    """Writes planner.json, every figure, and planner.md, the tables, into a folder."""
    content = {
        "header": asdict(results.header),
        "setups": [
            {
                "name": setup.name,
                "model": setup.model,
                "topology": asdict(setup.topology),
                "max_tokens_per_gpu": setup.max_tokens_per_gpu,
                "global_batch_size": setup.global_batch_size,
                "objective": setup.objective,
                "lengths": setup.length_names,
                "batches_per_length_set": setup.num_batches,
            }
            for setup in results.setups
        ],
        "rows": [asdict(row) for row in results.rows],
        "speed_ratios": [asdict(ratio) for ratio in results.speed_ratios],
        "growth": {
            "points": [asdict(point) for point in results.growth],
            "exponent_of_n_log_n": growth_exponent(list(results.growth)),
        },
    }
    sections = (_head, _summary, _tables, _speed, _growth)
    lines = [line for section in sections for line in section(results)]
    write_results("planner", content, report=lambda _: page_of(lines), out=out)


def _head(results: Results) -> list[str]:
    return [
        "# Planner benchmark",
        "",
        *header_lines(results.header),
        "**over bound**: predicted cost of the plan over a lower bound that no plan can beat, by the FLOPs of the",
        "model; mean and largest over batches; 1 is perfect. *step*: ranks meet once a step. *microbatch*: ranks",
        "meet in every micro-batch, slot by slot. **slots**: micro-batches of one rank in one step. They cost nothing",
        "by themselves here, which favours rows that take many. **over cap**: micro-batches of two samples or more",
        "that exceed `max_tokens_per_gpu`, of all.",
        "**plan ms**: median time to plan one global batch, and CPU time of it. Rows of other systems are written",
        "from their description, on this package's own first fit and Karmarkar-Karp, which are quicker than the",
        'originals\'; rows "its own functions" run the code of the wheel, all ranks one after another.',
        "",
    ]


def _summary(results: Results) -> list[str]:
    """Means over bound of every planner on every setup, and how often it breaks the cap."""
    table_rows: list[list[str]] = []
    for planner in dict.fromkeys(row.planner for row in results.rows):
        bold = "**" if planner == "ours" else ""
        rows = {row.setup: row for row in results.rows if row.planner == planner}
        means = [rows[setup.name].mean_over_bound for setup in results.setups]
        cells = ["–" if mean is None else f"{bold}{mean:.4f}{bold}" for mean in means]
        num_over, num_run = (sum(counts) for counts in zip(*map(_cap_counts, rows.values()), strict=True))
        over = f"{num_over / num_run:.1%}" if num_run else rows[results.setups[0].name].note
        table_rows.append([f"{bold}{planner}{bold}", *cells, over])
    names = [f"{setup.name} ({setup.objective})" for setup in results.setups]
    columns = " | ".join(["planner", *names, "over cap"])
    return ["## Over bound, mean, and micro-batches over the cap", "", table(columns, table_rows), ""]


def _cap_counts(row: Row) -> tuple[int, int]:
    return row.num_over_cap or 0, row.num_microbatches or 0


_COLUMNS = "planner | over bound | largest | slots | over cap | plan ms | CPU ms | note"


def _tables(results: Results) -> list[str]:
    lines: list[str] = []
    for setup in results.setups:
        rows = [row for row in results.rows if row.setup == setup.name]
        num_batches = len(setup.length_names) * setup.num_batches
        lines += [
            f"## {setup.name}: {setup.model}, {setup.objective}",
            "",
            f"{setup.global_batch_size} samples a step, {setup.max_tokens_per_gpu} tokens a GPU, {num_batches} "
            f"batches of {', '.join(setup.length_names)}.",
            "",
            table(_COLUMNS, [_cells(row, setup=setup) for row in rows], align="lrrrrrrl"),
            "",
        ]
    return lines


def _cells(row: Row, *, setup: Setup) -> list[str]:
    if row.mean_over_bound is None:
        return [row.planner, *"––––––", row.note]
    bold = "**" if row.planner == "ours" else ""
    return [
        f"{bold}{row.planner}{bold}",
        f"{bold}{row.mean_over_bound:.4f}{bold}",
        f"{row.max_over_bound:.4f}",
        f"{(row.num_microbatches or 0) / (row.num_batches * setup.topology.dp_size):.1f}",
        f"{row.num_over_cap} of {row.num_microbatches}",
        f"{row.plan_wall_ms:.1f}",
        f"{row.plan_cpu_ms:.1f}",
        row.note,
    ]


def _speed(results: Results) -> list[str]:
    if not results.speed_ratios:
        return []
    return [
        "## Speed against verl",
        "",
        f"One global batch of {results.speed_ratios[0].num_samples} samples on {results.speed_ratios[0].num_ranks} "
        "ranks, all timed in this one run. verl's ranks rearrange side by side; in our plan every rank plans all.",
        "",
        table(
            "against | its CPU ms | our CPU ms | times faster | by the clock | goal",
            map(_speed_cells, results.speed_ratios),
        ),
        "",
    ]


def _speed_cells(ratio: SpeedRatio) -> list[str]:
    milliseconds = f"{ratio.other_cpu_ms:.0f}", f"{ratio.ours_cpu_ms:.1f}"
    return [ratio.against, *milliseconds, f"{ratio.ratio:.1f}", f"{ratio.wall_ratio:.1f}", str(ratio.goal or "–")]


def _growth(results: Results) -> list[str]:
    lines = [
        "## Growth with the number of samples",
        "",
        f"CPU time grows as (n log n)^{growth_exponent(list(results.growth)):.2f}, fitted from {LARGE} samples up; "
        "smaller batches are refined, which costs more.",
        "",
    ]
    if results.plot:
        lines += [f"![Time of a plan over the number of samples]({results.plot})", ""]
    rows = [
        (one.num_samples, one.dp_size, f"{one.plan_wall_ms:.1f}", f"{one.plan_cpu_ms:.1f}") for one in results.growth
    ]
    return [*lines, table("samples | ranks | plan ms | CPU ms", rows, align="rrrr")]
