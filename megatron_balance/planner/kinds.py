"""Samples that are equal to the planner, counted: bounds look at kinds, of which a large batch has few for its size."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass

import numpy as np
from numpy.typing import NDArray

from megatron_balance.planner.sorting import run_starts, stable_order


@dataclass(frozen=True, eq=False)
class Kinds:
    """The kinds of the samples: those of one kind have the same cost, weight, shared cost and cost of images.

    Kinds are numbered by falling cost, then weight, then shared cost, then cost of images.

    Attributes:
        of_samples: `[num_samples]` int64 kind of each sample.
        costs: `[num_kinds]` int64 cost of a sample.
        shared_costs: `[num_kinds]` int64 shared cost of a sample.
        weights: `[num_kinds]` int64 weight of a sample.
        counts: `[num_kinds]` int64 samples of the kind.
    """

    of_samples: NDArray[np.int64]
    _: KW_ONLY
    costs: NDArray[np.int64]
    shared_costs: NDArray[np.int64]
    weights: NDArray[np.int64]
    counts: NDArray[np.int64]

    @classmethod
    def of(
        cls,
        costs: NDArray[np.int64],
        *,
        shared_costs: NDArray[np.int64],
        weights: NDArray[np.int64],
        image_costs: NDArray[np.int64] | None = None,
    ) -> Kinds:
        """The kinds of samples, `[num_samples]` each; None where images are no part of their own."""
        values, of_samples = np.unique(-costs, return_inverse=True)
        sample_of = np.empty(values.size, dtype=np.int64)
        sample_of[of_samples] = np.arange(costs.size)
        others = (weights, shared_costs) if image_costs is None else (weights, shared_costs, image_costs)
        # Nearly always the cost says it all: it follows from the length, as the others do.
        if not all((of_kinds[sample_of][of_samples] == of_kinds).all() for of_kinds in others):
            order = np.lexsort((*(-each for each in reversed(others)), of_samples))
            differs = np.any([run_starts(each[order]) for each in (of_samples, *others)], axis=0)
            of_samples[order] = np.cumsum(differs) - 1
            sample_of = order[differs]
        return cls(
            of_samples,
            costs=costs[sample_of],
            shared_costs=shared_costs[sample_of],
            weights=weights[sample_of],
            counts=np.bincount(of_samples, minlength=sample_of.size),
        )

    def order(self) -> NDArray[np.int64]:
        """Samples by kind, those of one kind in their order, `[num_samples]`."""
        return stable_order(self.of_samples)
