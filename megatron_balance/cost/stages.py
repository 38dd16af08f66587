"""Costs of pipeline stages whose chunks are not alike, and the split of layers that would even them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from megatron_balance.errors import BalanceError
from megatron_balance.model.layout import PipelineLayout
from megatron_balance.model.shape import ModelShape

if TYPE_CHECKING:
    from megatron_balance.cost.model import CostModel

STAGE_BITS = 10
"""Costs by kind of chunk are in units of 2**-10, so that 1.55 times a cost of one a token is told from 2."""

SPLIT_GAIN = 0.03
"""Another split is advised where the costliest stage loses so much of the mean."""


@dataclass(frozen=True)
class StageCosts:
    """The chunks of the stages of a pipeline, where they do not cost the same.

    Attributes:
        kinds: `[pp_size][vpp_size]` the kind of each chunk.
        costs: `[num_kinds]` what a chunk of this kind costs; only the proportions count, of each coefficient by itself.

    Raises:
        BalanceError: the table is no table, or names a kind that has no cost.
    """

    kinds: tuple[tuple[int, ...], ...]
    costs: tuple[CostModel, ...]

    def __post_init__(self) -> None:
        if len({len(stage) for stage in self.kinds}) != 1 or set().union(*self.kinds) != set(range(len(self.costs))):
            raise BalanceError(
                f"StageCosts.kinds is {self.kinds} for {len(self.costs)} costs: it must have as many chunks on every "
                "stage, and every kind must occur."
            )

    def kinds_of(self, whole: CostModel) -> tuple[CostModel, ...]:
        """For each kind what `whole` would cost if all its chunks were of this kind, in units of 2**-STAGE_BITS.

        Examples:
            >>> from megatron_balance import CostModel
            >>> stages = StageCosts(((0,), (1,)), (CostModel(linear=1), CostModel(linear=3)))
            >>> [cost(10) for cost in stages.kinds_of(CostModel(linear=7))]
            [35840, 107520]
        """
        kinds = [cost.terms() for cost in self.costs]
        chunks = [kinds[kind] for stage in self.kinds for kind in stage]

        def model(kind: Mapping[str | int, int]) -> CostModel:
            terms: dict[str | int, int] = {}
            for name, value in whole.terms().items():
                total, scaled = sum(chunk.get(name, 0) for chunk in chunks), value << STAGE_BITS
                share = 2 * scaled * len(chunks) * kind.get(name, 0)  # half a unit is rounded up
                terms[name] = (share + total) // (2 * total) if total else scaled
            if not any(terms.values()):
                terms["per_microbatch"] = 1
            return replace(whole.with_terms(terms), stages=None)

        return tuple(map(model, kinds))

    def whole_from_first(self, measured: CostModel) -> CostModel:
        """The costs of the whole model where those of its first stage, times `pp_size`, were measured."""
        terms, first = measured.terms(), [self.kinds_of(measured)[kind].terms() for kind in self.kinds[0]]
        for name, value in terms.items():
            if share := sum(kind[name] for kind in first):  # of terms that it lacks nothing is known
                terms[name] = (value * value * len(first) << STAGE_BITS) // share
        return measured.with_terms(terms)

    def loads(self, whole: CostModel, lengths: Any) -> list[float]:
        """`[pp_size]` cost of samples of these lengths on each stage, over that of an even share."""
        costs = [float(kind(np.asarray(lengths)).astype(np.float64).sum()) for kind in self.kinds_of(whole)]
        stages = [sum(costs[kind] for kind in stage) for stage in self.kinds]
        return [stage * len(stages) / sum(stages) for stage in stages]


def split_advice(
    cost_of: Callable[[PipelineLayout], CostModel], *, layout: PipelineLayout, shape: ModelShape, lengths: Any
) -> str:
    """A sentence on the costliest stage, and the flags that would even the stages; empty where none would pay.

    `cost_of` is the cost model of the run in a layout.
    """

    def loads(layout: PipelineLayout) -> list[float]:
        model = cost_of(layout)
        return model.stages.loads(model, lengths) if model.stages else [1.0]

    current = loads(layout)
    splits = [(max(loads(split)), flags) for flags, split in layout.alternatives(shape).items()]
    # Of splits that are about as good the one that is simpler to say.
    best = min(
        splits, default=(max(current), ""), key=lambda split: (split[0] // SPLIT_GAIN, "|" in split[1], len(split[1]))
    )
    least, flags = best
    if max(current) < least + SPLIT_GAIN:
        return ""
    return (
        f"pipeline stage {current.index(max(current)) + 1} of {len(current)} computes {max(current):.2f} times the "
        f"mean; {flags} makes that {least:.2f}."
    )
