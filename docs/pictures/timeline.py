"""Draws ranks as rows of bars over time, in colours that read on a light and on a dark page.

Invariant: nothing is opaque but bars; text and lines are of one grey that stands off from white as from black.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from panels import Panel

GREY = "#808080"
"""3.9 to 1 against white and against the site's dark page, 4.8 to 1 against GitHub's: text is large."""

CHEAP, COSTLY = (0.56, 0.74, 0.98), (0.14, 0.36, 0.80)
"""Colours of a bar of no cost and of the costliest."""

IDLE, HATCH = "//////", "#8c8c8c"

INK = {"light": "#1f2328", "dark": "#e6edf3"}
"""Text and lines of a picture that has a variant for each kind of page."""

mpl.rcParams |= {
    "svg.fonttype": "none",  # text stays text: sharp, and found by a search
    "svg.hashsalt": "megatron_balance",  # the same file every time
    "font.size": 12,
    "hatch.linewidth": 1,
    "text.color": GREY,
    "axes.edgecolor": GREY,
    "axes.labelcolor": GREY,
    "xtick.color": GREY,
    "ytick.color": GREY,
}


def draw(panels: Sequence[Panel], *, time_label: str, path: Path, schemes: Sequence[str] = ()) -> None:
    """Panels below one another over one time axis, written as SVG; with `schemes` of INK as NAME_SCHEME.svg each."""
    num_rows = sum(len(panel.rows) for panel in panels)
    figure = Figure(figsize=(9, 0.3 * num_rows + 0.75 * len(panels) + 0.5), layout="constrained")
    axes = figure.subplots(
        len(panels), 1, sharex=True, squeeze=False, height_ratios=[len(panel.rows) for panel in panels]
    )[:, 0]
    for axis, panel in zip(axes, panels, strict=True):
        _draw_panel(axis, panel)
    axes[0].set_xlim(0, 1.005 * max(bar.start + bar.duration for panel in panels for bar in panel.bars))
    axes[-1].set_xlabel(time_label)
    worked = Patch(facecolor=COSTLY, label="a rank works, darker the longer")
    waits = Patch(facecolor="none", edgecolor=HATCH, linewidth=0, hatch=IDLE, label="it waits for the slowest")
    figure.legend(handles=[worked, waits], loc="outside upper left", ncols=2, frameon=False, borderaxespad=0)
    figure.savefig(path, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    if schemes:
        text = path.read_text()
        path.unlink()
        for scheme in schemes:
            path.with_stem(f"{path.stem}_{scheme}").write_text(text.replace(GREY, INK[scheme]))


def _draw_panel(axis: Axes, panel: Panel) -> None:
    axis.set_title(panel.title, loc="left", fontsize=13, fontweight="bold")
    for bar in panel.bars:
        style = {"facecolor": "none", "edgecolor": HATCH, "linewidth": 0, "hatch": IDLE}
        if bar.shade is not None:
            mixed = [low + (high - low) * bar.shade for low, high in zip(CHEAP, COSTLY, strict=True)]
            style = {"facecolor": mixed, "edgecolor": "white", "linewidth": 0.6}
        row = bar.row + (bar.num_rows - 1) / 2
        axis.barh(row, bar.duration, left=bar.start, height=bar.num_rows - 0.18, **style)
        if bar.label:
            middle = bar.start + bar.duration / 2
            colour = "white" if (bar.shade or 0) > 0.45 else "#10233f"
            axis.text(middle, row, bar.label, ha="center", va="center_baseline", fontsize=9, color=colour)
    for meeting in panel.meetings:
        axis.axvline(meeting, color=GREY, linewidth=1)
    axis.set_yticks(range(len(panel.rows)), panel.rows)
    axis.set_ylim(len(panel.rows) - 0.4, -0.6)
    axis.tick_params(length=0)
    for side in ("top", "right", "left"):
        axis.spines[side].set_visible(False)
