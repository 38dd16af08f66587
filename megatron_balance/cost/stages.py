"""Costs of pipeline stages whose chunks are not alike."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from megatron_balance.errors import BalanceError

if TYPE_CHECKING:
    from megatron_balance.cost.model import CostModel

STAGE_BITS = 10
"""Costs by kind of chunk are in units of 2**-10, so that 1.55 times a cost of one a token is told from 2."""


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
