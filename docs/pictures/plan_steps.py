"""Draw plan_steps.svg: one batch through the steps of planner/level_packing.py, by the planner's own functions.

python docs/pictures/plan_steps.py
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megatron_balance import CostModel, Limits, ModelShape, Topology, build_data_schedule
from megatron_balance.lengths import synthetic_lengths
from megatron_balance.planner import Batch, batch_of, level_packing

PICTURE = Path(__file__).with_name("plan_steps.svg")
COST_MODEL = replace(CostModel.from_shape(ModelShape.preset("Qwen3-8B")), per_microbatch=0)
CAP = 16384
TOPOLOGY = Topology(4, ep_size=2)
"""Two groups of two ranks that meet in every micro-batch."""
_FILES = synthetic_lengths("code_files", num_samples=60, seed=4)
LENGTHS = _FILES[_FILES <= CAP]

Ints = NDArray[np.int64]
_SVG = 'xmlns="http://www.w3.org/2000/svg" font-family="sans-serif" role="img"'
_TARGET = 'stroke="#b03a2e" stroke-width="1.5" stroke-dasharray="4 2"'
_WIDTH, _PANEL, _TITLE, _LEFT = 940, 96, 30, 20


def picture() -> str:
    """The drawing as SVG."""
    schedule = build_data_schedule(LENGTHS, cost_model=COST_MODEL, topology=TOPOLOGY, limits=Limits(CAP))
    batch = batch_of(schedule)
    assert isinstance(batch, Batch)
    order = np.argsort(-batch.local_cost, kind="stable")
    batch = batch.take(order)
    bound, rows, work = batch.lower_bound(), schedule.num_microbatches, batch.min_work
    high, bases, used = level_packing._dominated_slots(batch, rows, expert_cap=work)
    rest = np.flatnonzero(high < 0)
    bins, goals = level_packing._targets(batch, rest, rows, slope=0, bases=bases, used=used)
    target = np.zeros(batch.num_ranks * rows, dtype=np.int64)
    target[bins] = goals[:, 0]
    poured = high.copy()
    poured[rest] = bins[level_packing.assign_samples(batch, rest, goals)]
    leveled = level_packing.equalize(batch, rows, slope=0, expert_cap=work)
    assert leveled is not None
    polished = level_packing._searched(batch, leveled)

    def over(bin_of: Ints) -> str:
        return f"{int(batch.slot_times(bin_of, rows).sum(axis=1).max()) / bound:.4f}"

    scale = (_PANEL - 8) / int(batch.local_cost.max())
    drawn = _Drawing(batch, rows=rows, scale=scale)
    drawn.sorted_samples(
        f"Step 1: {order.size} samples by descending cost; {rows} slots are the fewest that the cap allows"
    )
    count = len(np.unique(high[high >= 0] // batch.sync_size))
    drawn.bins(f"Step 2: samples fill up slots that one sample dominates, of which there are {count}", high)
    drawn.bins("Step 3: a target for every other bin (dashed): the remaining cost, spread like water", high, target)
    drawn.bins(f"Step 4: costliest first, to the group and the bin furthest behind: {over(poured)}", poured, target)
    drawn.bins(
        f"Step 6: lower targets where a group ends late; bins by load, cut into slots: {over(leveled.bin_of)}",
        leveled.bin_of,
    )
    drawn.bins(f"Step 7: the best moves and swaps: {over(polished.bin_of)}", polished.bin_of)
    rank, slot = np.divmod(schedule.microbatch_of[order], rows)
    group, column = np.divmod(rank, batch.sync_size)
    last = (group * rows + slot) * batch.sync_size + column
    drawn.bins(f"Step 10: slots in order, longest first: {over(last)} of the bound", last)
    return drawn.svg()


class _Drawing:
    """Panels from the top down. A bar is a sample, as high as its cost; bins stand side by side."""

    def __init__(self, batch: Batch, *, rows: int, scale: float) -> None:
        self._batch, self._rows, self._scale = batch, rows, scale
        self._parts: list[str] = []
        self._bottom = 0

    def sorted_samples(self, title: str) -> None:
        self._panel(title)
        width = (_WIDTH - 2 * _LEFT) / self._batch.num_samples
        for sample in range(self._batch.num_samples):
            self._sample(sample, left=_LEFT + sample * width, width=width - 2, base=0)

    def bins(self, title: str, bin_of: Ints, target: Ints | None = None) -> None:
        """`bin_of`: `[num_samples]`, -1 where a sample has no bin yet; `target`: `[num_bins]`, 0 for none."""
        self._panel(title)
        batch, filled = self._batch, np.zeros(self._batch.num_ranks * self._rows, dtype=np.int64)
        # A gap after every row, a larger one between groups.
        row_width = batch.sync_size * 30 + 16
        group_width = (_WIDTH - 2 * _LEFT) / batch.num_groups
        row = np.arange(filled.size) // batch.sync_size
        lefts = _LEFT + row // self._rows * group_width + row % self._rows * row_width
        lefts = lefts + np.arange(filled.size) % batch.sync_size * 30
        for sample in np.flatnonzero(bin_of >= 0).tolist():
            place = int(bin_of[sample])
            self._sample(sample, left=float(lefts[place]), width=26, base=int(filled[place]))
            filled[place] += batch.local_cost[sample]
        for place, left in enumerate(lefts.tolist()):
            self._parts.append(f'<path d="M{left:.0f} {self._bottom}h26" stroke="#44546a"/>')
            if target is not None and target[place]:
                top = self._bottom - int(target[place]) * self._scale
                self._parts.append(f'<path d="M{left - 1:.0f} {top:.1f}h28" {_TARGET}/>')

    def svg(self) -> str:
        height = self._bottom + 12
        return "\n".join(
            [
                f'<svg {_SVG} viewBox="0 0 {_WIDTH} {height}">',
                "<title>One batch through the steps of the planner</title>",
                f'<rect width="{_WIDTH}" height="{height}" fill="#ffffff"/>',
                *self._parts,
                "</svg>",
                "",
            ]
        )

    def _panel(self, title: str) -> None:
        self._parts.append(f'<text x="{_LEFT}" y="{self._bottom + 22}" font-size="14" fill="#1b2a41">{title}</text>')
        self._bottom += _TITLE + _PANEL

    def _sample(self, sample: int, *, left: float, width: float, base: int) -> None:
        cost = int(self._batch.local_cost[sample])
        top = self._bottom - (base + cost) * self._scale
        shade = 88 - round(50 * cost / int(self._batch.local_cost.max()))
        self._parts.append(
            f'<rect x="{left:.1f}" y="{top:.1f}" width="{width:.1f}" height="{cost * self._scale:.1f}" '
            f'fill="hsl(214 40% {shade}%)" stroke="#ffffff" stroke-width="0.6"/>'
        )


if __name__ == "__main__":
    PICTURE.write_text(picture(), encoding="utf-8")
