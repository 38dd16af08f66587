"""Draws the losses of two runs over each other, and their difference below, as SVG without a plotting library.

Text and lines are of colours that stand off from a white page as from a dark one; the ground is transparent.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

WIDTH, LEFT, RIGHT = 900, 92, 12
LOSSES, DIFFERENCE = (34, 330), (372, 478)
"""Top and bottom of the two panels."""

GREY, STOCK, BALANCED = "#808080", "#e08a2b", "#3f7fe0"


def overlay(stock: Sequence[float], balanced: Sequence[float]) -> str:
    """The drawing, of as many steps as both have."""
    losses = np.array([stock, balanced])
    difference = losses[1] / losses[0] - 1
    largest = float(np.abs(difference).max()) or 1.0
    steps = losses.shape[1]
    parts = [
        _text(LEFT, 22, "loss"),
        _text(LEFT + 60, 22, "stock", STOCK),
        _text(LEFT + 120, 22, "balanced", BALANCED),
        *_panel(LOSSES, low=float(losses.min()), high=float(losses.max()), form="{:.2f}"),
        _line(losses[0], LOSSES, low=losses.min(), high=losses.max(), colour=STOCK, width=3.5),
        _line(losses[1], LOSSES, low=losses.min(), high=losses.max(), colour=BALANCED, width=1.2),
        _text(LEFT, 360, "balanced over stock, less 1"),
        *_panel(DIFFERENCE, low=-largest, high=largest, form="{:+.1e}"),
        _line(difference, DIFFERENCE, low=-largest, high=largest, colour=BALANCED, width=1),
        _text(LEFT, 496, "step 1"),
        _text(WIDTH - RIGHT, 496, f"step {steps:,}", anchor="end"),
    ]
    box = f'viewBox="0 0 {WIDTH} 506" font-family="sans-serif" font-size="14" role="img"'
    title = f"<title>Losses of {steps} steps, stock and balanced; they differ by at most {largest:.1e}</title>"
    return "\n".join([f'<svg xmlns="http://www.w3.org/2000/svg" {box}>', title, *parts, "</svg>", ""])


def _panel(span: tuple[int, int], *, low: float, high: float, form: str) -> list[str]:
    """Lines at the top, the middle and the bottom, with their values."""
    top, bottom = span
    parts: list[str] = []
    for part in (0.0, 0.5, 1.0):
        height = bottom - part * (bottom - top)
        parts.append(f'<path d="M{LEFT} {height:.0f}H{WIDTH - RIGHT}" stroke="{GREY}" stroke-opacity="0.4"/>')
        parts.append(
            _text(LEFT - 8, height + 5, form.format(low + part * (high - low)).replace("+0.0e+00", "0"), anchor="end")
        )
    return parts


def _line(
    values: NDArray[np.float64], span: tuple[int, int], *, low: float, high: float, colour: str, width: float
) -> str:
    top, bottom = span
    across = np.linspace(LEFT, WIDTH - RIGHT, values.size)
    heights = bottom - (values - low) / ((high - low) or 1.0) * (bottom - top)
    points = " ".join(f"{x:.1f},{y:.1f}" for x, y in zip(across, heights, strict=True))
    return f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="{width}"/>'


def _text(x: float, y: float, words: str, colour: str = GREY, *, anchor: str = "start") -> str:
    return f'<text x="{x:.0f}" y="{y:.0f}" fill="{colour}" text-anchor="{anchor}">{words}</text>'
