"""Compares policies at several ranks or caps: `--sweep dp_size=2,4,8`, once or twice.

Throughput is per GPU, so that points with different numbers of GPUs can be compared. The global batch is kept.

Invariant: every point plans the same steps under the same policies.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from megatron_balance.cli.comparison.batches import GlobalBatch
from megatron_balance.cli.comparison.results import PolicyMeans, Question
from megatron_balance.errors import BalanceError
from megatron_balance.planner.throughput import num_gpus
from megatron_balance.topology import Limits, Topology

SWEPT = ("dp_size", "cp_size", "max_tokens_per_gpu")
"""Sizes that can be swept."""

EQUAL_WITHIN = 0.005
"""Throughputs within this fraction count as equal: the smaller size or cap then wins."""


@dataclass(frozen=True)
class Axis:
    """One swept size.

    Attributes:
        name: one of SWEPT.
        values: in the order given.
    """

    name: str
    values: tuple[int, ...]


@dataclass(frozen=True)
class SweepPoint:
    """One point of a sweep.

    Attributes:
        values: of the axes, in their order.
        num_gpus: of the whole run there.
        waiting: the imbalance that the times follow there.
        floor_worst: single-sample floor of the worst step.
        policies: figures of each.
    """

    values: tuple[int, ...]
    num_gpus: int
    waiting: str
    floor_worst: float
    policies: tuple[PolicyMeans, ...]

    @property
    def best(self) -> PolicyMeans:
        """The fastest; of equals the one with fewer flags."""
        return max(self.policies, key=lambda figures: figures.tokens_per_second_per_gpu)


def parse_sweeps(texts: Sequence[str]) -> tuple[Axis, ...]:
    """`["dp_size=2,4", …]` as axes.

    Raises:
        BalanceError: a name is unknown or doubled, a value is no positive integer, or there are more than two.
    """
    axes: list[Axis] = []
    for text in texts:
        name, _, values = text.partition("=")
        if name not in SWEPT:
            raise BalanceError(f"--sweep is {text!r}: it must be NAME=V1,V2,… with NAME one of {', '.join(SWEPT)}.")
        if not values or not all(value.isdecimal() and int(value) for value in values.split(",")):
            raise BalanceError(f"--sweep is {text!r}: its values must be integers of at least 1, parted by commas.")
        axes.append(Axis(name, tuple(int(value) for value in values.split(","))))
    if len(axes) > 2 or len({axis.name for axis in axes}) < len(axes):
        raise BalanceError(f"--sweep names {', '.join(axis.name for axis in axes)}: give one or two different sizes.")
    return tuple(axes)


def num_points(axes: Sequence[Axis]) -> int:
    """Points of the sweep; 1 without one."""
    points = 1
    for axis in axes:
        points *= len(axis.values)
    return points


def run_sweep(
    axes: Sequence[Axis],
    batches: Sequence[GlobalBatch],
    *,
    question: Question,
    topology: Topology,
    limits: Limits,
    after_step: Callable[[], None] = lambda: None,
) -> list[SweepPoint]:
    """Compare at every combination of the axes' values, the last axis changing fastest.

    Args:
        axes: the swept sizes.
        batches: `[num_steps]`.
        question: the comparison.
        topology: the ranks, where they are not swept.
        limits: likewise.
        after_step: called after every planned step.
    """
    points: list[SweepPoint] = []
    for values in itertools.product(*(axis.values for axis in axes)):
        sizes = {axis.name: value for axis, value in zip(axes, values, strict=True)}
        cap = sizes.pop("max_tokens_per_gpu", limits.max_tokens_per_gpu)
        there = replace(topology, **sizes)
        same_ranks = there.dp_size == topology.dp_size
        dealt = batches if same_ranks else [replace(batch, loaded_by=None) for batch in batches]
        comparison = question.compare(dealt, topology=there, limits=Limits(cap), after_step=after_step)
        points.append(
            SweepPoint(
                values=values,
                num_gpus=num_gpus(there),
                waiting=comparison.waiting,
                floor_worst=max(step.single_sample_floor for step in comparison.stock.metrics),
                policies=tuple(comparison.figures(result) for result in comparison.results),
            )
        )
    return points


def relative_to(points: Sequence[SweepPoint]) -> float:
    """The unit of throughput where no speed is known: stock's at the first point."""
    return points[0].policies[0].tokens_per_second_per_gpu


def best_point(points: Sequence[SweepPoint]) -> SweepPoint:
    """The point with the highest throughput per GPU; of equal ones the one with the smallest sizes."""
    highest = max(point.best.tokens_per_second_per_gpu for point in points)
    equal = [point for point in points if point.best.tokens_per_second_per_gpu >= highest * (1 - EQUAL_WITHIN)]
    return min(equal, key=lambda point: point.values)
