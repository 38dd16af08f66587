"""The figures of a balanced step, and their means over the steps between two log lines.

All but the measured ones are this rank's view of the plan, which is the same on every rank; plan, exchange and
exposed times are those of the rank that logs.

Invariant: a figure that is not known is NaN, is left out of means, and is never written as a number.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from megatron_balance.planner import DataSchedule, slowest_over_mean

_UNKNOWN = float("nan")


@dataclass(frozen=True)
class Figures:
    """Of one step, or means over several.

    Attributes:
        planned_imbalance: slowest over mean as planned, by the objective: of ranks, or under `microbatch` of the
            costliest rank in each slot, summed. The report shows the same.
        measured_imbalance: busiest rank's seconds over the mean rank's, as measured (`telemetry/watch.py` says what
            is in them), among the data-parallel ranks of one pipeline stage and context-parallel rank.
        busiest_rank_seconds: of the busiest rank, as measured.
        over_bound: planned cost over its lower bound.
        num_microbatches: slots of every rank.
        num_shapes: distinct lengths of this rank's micro-batches since it started, filled up as they run.
        padding_fraction: padding, filler and dummies over all tokens that ran.
        moved_fraction: tokens that ran off the rank that loaded them, over all tokens; unknown where samples are shared
            by several data-parallel ranks.
        moved_fraction_unlabelled: the same, had interchangeable ranks not been exchanged.
        plan_seconds, exchange_seconds, exposed_seconds: see BalancedStep.
        tokens_at_cp: tokens that ran at context-parallel sizes 1, 2, 4 …, over all tokens; none where all micro-batches
            have the run's size.
    """

    planned_imbalance: float = _UNKNOWN
    measured_imbalance: float = _UNKNOWN
    busiest_rank_seconds: float = _UNKNOWN
    over_bound: float = _UNKNOWN
    num_microbatches: float = _UNKNOWN
    num_shapes: float = _UNKNOWN
    padding_fraction: float = _UNKNOWN
    moved_fraction: float = _UNKNOWN
    moved_fraction_unlabelled: float = _UNKNOWN
    plan_seconds: float = _UNKNOWN
    exchange_seconds: float = _UNKNOWN
    exposed_seconds: float = _UNKNOWN
    tokens_at_cp: tuple[float, ...] = ()

    @property
    def mean_cp_size(self) -> float:
        """Context-parallel size of the mean token."""
        return sum(share * 2**level for level, share in enumerate(self.tokens_at_cp))

    @classmethod
    def of_schedule(
        cls,
        schedule: DataSchedule,
        *,
        step_tokens: int,
        plan_seconds: float,
        exchange_seconds: float,
        seconds: NDArray[np.float64],
    ) -> Figures:
        """The figures of a step: cheap sums alone, since every step computes them.

        Args:
            schedule: the plan.
            step_tokens: that run in the step, filler included.
            plan_seconds: as in BalancedStep.
            exchange_seconds: likewise.
            seconds: `[dp_size]` measured, of an earlier step; 0 where not known.
        """
        tokens = int(schedule.lengths.sum())
        moved = _UNKNOWN
        if schedule.home_ranks is not None and not schedule.topology.dynamic_cp:
            moved = int(schedule.lengths[schedule.destinations() != schedule.home_ranks].sum()) / max(tokens, 1)
        unlabelled = schedule.moved_tokens_before_relabel
        planned = slowest_over_mean(schedule.cost_grid, objective=schedule.objective, topology=schedule.topology)
        measured = bool((seconds > 0).all())
        return cls(
            planned_imbalance=planned,
            measured_imbalance=float(seconds.max() / seconds.mean()) if measured else _UNKNOWN,
            busiest_rank_seconds=float(seconds.max()) if measured else _UNKNOWN,
            over_bound=schedule.predicted_cost / schedule.lower_bound if schedule.lower_bound else 1.0,
            num_microbatches=schedule.num_microbatches,
            padding_fraction=1 - tokens / max(step_tokens, 1),
            moved_fraction=moved,
            moved_fraction_unlabelled=_UNKNOWN if unlabelled is None else unlabelled / max(tokens, 1),
            plan_seconds=plan_seconds,
            exchange_seconds=exchange_seconds,
            tokens_at_cp=_tokens_at_cp(schedule) if schedule.topology.dynamic_cp else (),
        )

    @classmethod
    def mean(cls, figures: Sequence[Figures]) -> Figures:
        """Each figure's mean over the steps where it is known."""
        rows = [of_step.row() for of_step in figures]
        return cls.of_row([_mean_of_known(column) for column in zip(*rows, strict=True)])

    def row(self) -> list[float]:
        """All figures in one order, unknown ones as well."""
        return [*(getattr(self, name) for name in _NAMES), *self.tokens_at_cp]

    @classmethod
    def of_row(cls, row: Sequence[float]) -> Figures:
        """The inverse."""
        return cls(*row[: len(_NAMES)], tokens_at_cp=tuple(row[len(_NAMES) :]))

    def known(self) -> dict[str, float]:
        """Name and value of every figure that is known."""
        values = {name: getattr(self, name) for name in _NAMES}
        if self.tokens_at_cp:
            values["mean_cp_size"] = self.mean_cp_size
            values |= {f"tokens_at_cp_{2**level}": share for level, share in enumerate(self.tokens_at_cp)}
        return {name: value for name, value in values.items() if not math.isnan(value)}


_NAMES = tuple(field.name for field in fields(Figures) if field.name != "tokens_at_cp")


def _mean_of_known(values: Sequence[float]) -> float:
    known = [value for value in values if not math.isnan(value)]
    return sum(known) / len(known) if known else _UNKNOWN


def _tokens_at_cp(schedule: DataSchedule) -> tuple[float, ...]:
    sizes = schedule.cp_size_grid.ravel()[schedule.slot_of]
    total = max(int(schedule.lengths.sum()), 1)
    return tuple(int(schedule.lengths[sizes == size].sum()) / total for size in schedule.topology.dynamic_cp_sizes)


def log_line(figures: Figures) -> str:
    """The log line of these steps."""
    measured = "unknown"
    if not math.isnan(figures.measured_imbalance):
        measured = f"{figures.measured_imbalance:.4f} (busiest rank {figures.busiest_rank_seconds * 1e3:.1f} ms)"
    parts = [
        f"max/mean of rank time: planned {figures.planned_imbalance:.4f}, measured {measured}",
        f"{figures.over_bound:.4f} of the bound",
        f"micro-batches {figures.num_microbatches:.4g} ({figures.num_shapes:.0f} shapes so far)",
        *([_sizes(figures)] if figures.tokens_at_cp else []),
        f"padding {figures.padding_fraction:.1%}",
        *([] if math.isnan(figures.moved_fraction) else [_moved(figures)]),
        f"plan {figures.plan_seconds * 1e3:.1f} ms",
        f"exchange {figures.exchange_seconds * 1e3:.1f} ms",
        f"exposed {figures.exposed_seconds * 1e3:.1f} ms",
    ]
    return " | ".join(parts)


def _sizes(figures: Figures) -> str:
    shares = ", ".join(f"{2**level}: {share:.0%}" for level, share in enumerate(figures.tokens_at_cp) if share)
    return f"context-parallel size {figures.mean_cp_size:.2f} of the mean token ({shares})"


def _moved(figures: Figures) -> str:
    return f"moved {figures.moved_fraction:.0%} of tokens, not {figures.moved_fraction_unlabelled:.0%}"
