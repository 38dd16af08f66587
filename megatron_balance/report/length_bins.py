"""Bins sequences and their costs by length."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron_balance.report.run_figures import RunFigures

BINS_PER_DOUBLING = {7: 1, 4: 2, 0: 4}
"""Bins per doubling of the length, by the least number of doublings from the shortest to the longest."""


@dataclass(frozen=True, eq=False)
class LengthBins:
    """A histogram.

    Attributes:
        labels: `[num_bins]` the longest length of each bin.
        counts: `[num_bins]` part of the sequences.
        costs: `[num_bins]` part of the predicted cost.
        summary: the distribution as text.
    """

    labels: tuple[str, ...]
    counts: NDArray[np.float64]
    costs: NDArray[np.float64]
    summary: str


def length_bins(figures: RunFigures) -> LengthBins:
    """Bin all sequences of a run; costs are those of the run's first cost model."""
    info = figures.info
    lengths = np.concatenate([step.segment_lengths for step in figures.record.steps])
    unique, counts = np.unique(lengths, return_counts=True)
    costs = np.array([float(info.cost_model(length)) for length in info.topology.padded_seq_len(unique).tolist()])
    costs *= counts
    edges = _edges(int(unique[0]), int(unique[-1]))
    places = np.searchsorted(edges, unique)
    num_bins = edges.size
    return LengthBins(
        labels=tuple(_label(edge) for edge in edges.tolist()),
        counts=np.bincount(places, weights=counts, minlength=num_bins) / lengths.size,
        costs=np.bincount(places, weights=costs, minlength=num_bins) / max(float(costs.sum()), 1.0),
        summary=_summary(unique, counts=counts, costs=costs),
    )


def _edges(shortest: int, longest: int) -> NDArray[np.int64]:
    """The longest length of each bin, ascending, the last one at or above `longest`."""
    first, last = max(shortest - 1, 0).bit_length(), max(longest - 1, 1).bit_length()
    per_doubling = next(number for least, number in BINS_PER_DOUBLING.items() if last - first >= least)
    powers = np.arange(per_doubling * first, per_doubling * last + 1) / per_doubling
    return np.unique(np.rint(2**powers).astype(np.int64))


def _label(edge: int) -> str:
    return f"≤{edge // 1024}k" if edge % 1024 == 0 and edge else f"≤{edge:,}"


def _summary(lengths: NDArray[np.int64], *, counts: NDArray[np.int64], costs: NDArray[np.float64]) -> str:
    total = int(counts.sum())
    cumulative = np.cumsum(counts)
    median = int(lengths[np.searchsorted(cumulative, (total + 1) // 2)])
    # The number of the longest sequences that make up half of the cost.
    from_longest = np.cumsum(costs[::-1])
    needed = int(np.searchsorted(from_longest, from_longest[-1] / 2))
    longest_part = int(counts[::-1][: needed + 1].sum()) / total
    return (
        f"{total:,} sequences: median {median:,}, mean {float(lengths @ counts) / total:,.0f}, longest "
        f"{int(lengths[-1]):,} tokens. The longest {longest_part:.1%} of them make up half of the cost. "
        "A bin is named by its longest length; 1k is 1,024."
    )
