"""One step of a run: its lengths, plan and measured seconds, as arrays and as a line of a record.

Invariant: a step that was read from a line can be judged and drawn: every index in it is one of an array in it, and
every size is that of an array that the line holds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_balance.cost.model import CostModel
from megatron_balance.planner import DataSchedule, as_integers
from megatron_balance.topology import Topology

_MAX_COST_SHIFT = 1024
_TIMES = ("plan_seconds", "exchange_seconds", "exposed_seconds")


@dataclass(frozen=True, eq=False)
class StepRecord:
    """One step.

    Attributes:
        iteration: Megatron's count of it, from 1.
        num_microbatches: slots of every rank, or the most of a leaf.
        segment_lengths: `[sum(num_segments)]` int64 original tokens of each sequence.
        num_segments: `[num_samples]` int64 sequences of each sample.
        slot_of: `[num_samples]` int64 `rank * num_microbatches + slot`.
        home_ranks: `[num_samples]` int64 rank that loaded each sample.
        cost_grid: `[dp_size, num_microbatches]` int64 predicted costs, in units of `2**cost_shift`.
        cost_shift: see DataSchedule.
        cost_model: what the step was planned with.
        plan_seconds, exchange_seconds, exposed_seconds: spent planning, moving, and waiting for both.
        seconds: `[dp_size, num_microbatches]` measured, forward and backward; NaN where it was not, 0 where a leaf
            has no such slot.
        cp_sizes: `[num_leaves, num_microbatches]` int64 leaves that share each micro-batch, 1 for a dummy, 0 where a
            leaf has no such slot; None where all have the run's size. With sizes, cost_grid and seconds have a row a
            leaf too, and slot_of holds the first leaf of a sample's group as its rank (DataSchedule).
    """

    _: KW_ONLY
    iteration: int
    num_microbatches: int
    segment_lengths: NDArray[np.int64]
    num_segments: NDArray[np.int64]
    slot_of: NDArray[np.int64]
    home_ranks: NDArray[np.int64]
    cost_grid: NDArray[np.int64]
    cost_shift: int
    cost_model: CostModel
    plan_seconds: float
    exchange_seconds: float
    exposed_seconds: float
    seconds: NDArray[np.float64]
    cp_sizes: NDArray[np.int64] | None = None

    @classmethod
    def of_schedule(
        cls,
        schedule: DataSchedule,
        *,
        iteration: int,
        plan_seconds: float = 0.0,
        exchange_seconds: float = 0.0,
        exposed_seconds: float = 0.0,
    ) -> StepRecord:
        """A step as it was planned, not measured yet."""
        num_samples = schedule.slot_of.size
        cp_sizes = schedule.cp_size_grid if schedule.topology.dynamic_cp else None
        lengths, counts, homes = schedule.segment_lengths, schedule.num_segments, schedule.home_ranks
        return cls(
            iteration=iteration,
            num_microbatches=schedule.num_microbatches,
            segment_lengths=schedule.lengths if lengths is None else lengths,
            num_segments=np.ones(num_samples, dtype=np.int64) if counts is None else counts,
            slot_of=schedule.slot_of,
            home_ranks=np.zeros(num_samples, dtype=np.int64) if homes is None else homes,
            cost_grid=schedule.cost_grid,
            cost_shift=schedule.cost_shift,
            cost_model=schedule.cost_model,
            plan_seconds=plan_seconds,
            exchange_seconds=exchange_seconds,
            exposed_seconds=exposed_seconds,
            seconds=unmeasured(schedule.cost_grid.shape, cp_sizes=cp_sizes),
            cp_sizes=cp_sizes,
        )

    @property
    def lengths(self) -> NDArray[np.int64]:
        """`[num_samples]` original tokens of each sample."""
        samples = np.repeat(np.arange(self.num_segments.size), self.num_segments)
        return np.bincount(samples, weights=self.segment_lengths, minlength=self.num_segments.size).astype(np.int64)


def unmeasured(shape: tuple[int, ...], *, cp_sizes: NDArray[np.int64] | None) -> NDArray[np.float64]:
    """`StepRecord.seconds` before anything was measured."""
    seconds = np.full(shape, np.nan)
    if cp_sizes is not None:
        seconds[cp_sizes == 0] = 0.0
    return seconds


def line_of(step: StepRecord, *, cost_model: CostModel) -> dict[str, Any]:
    """A step without its measurements, as JSON. `cost_model`: the run's; a step with the same one leaves it out."""
    line: dict[str, Any] = {"kind": "step", "iteration": step.iteration, "num_microbatches": step.num_microbatches}
    line["segment_lengths"] = step.segment_lengths.tolist()
    if (step.num_segments != 1).any():
        line["num_segments"] = step.num_segments.tolist()
    line |= {"slot_of": step.slot_of.tolist(), "home_ranks": step.home_ranks.tolist()}
    line |= {"cost_grid": step.cost_grid.ravel().tolist(), "cost_shift": step.cost_shift}
    if step.cp_sizes is not None:
        line["cp_sizes"] = step.cp_sizes.ravel().tolist()
    if step.cost_model != cost_model:
        line["cost_model"] = asdict(step.cost_model)
    return line | {name: getattr(step, name) for name in _TIMES}


def step_of(line: Mapping[str, Any], *, cost_model: CostModel, topology: Topology) -> StepRecord:
    """The step that `line_of` wrote.

    Raises:
        KeyError, TypeError, ValueError: the line holds no possible step.
    """
    num_slots, iteration, shift = (line[name] for name in ("num_microbatches", "iteration", "cost_shift"))
    for name, value, least in (
        ("num_microbatches", num_slots, 1),
        ("iteration", iteration, 0),
        ("cost_shift", shift, 0),
    ):
        if type(value) is not int or value < least:
            raise ValueError(f"{name} is {value!r}")
    num_ranks = topology.num_leaves if topology.dynamic_cp else topology.dp_size
    slot_of = _integers(line, "slot_of", below=num_ranks * num_slots)
    counts = {"num_segments": [1] * slot_of.size, **line}
    num_segments = _integers(counts, "num_segments", size=slot_of.size)
    segment_lengths = _integers(line, "segment_lengths", size=int(num_segments.sum()))
    home_ranks = _integers(line, "home_ranks", size=slot_of.size, below=topology.dp_size)
    shape = (num_ranks, num_slots)
    grid = _integers(line, "cost_grid", size=num_ranks * num_slots, bits=61).reshape(shape)
    if ("cp_sizes" in line) != topology.dynamic_cp:
        raise ValueError(f"step {iteration} has {'' if 'cp_sizes' in line else 'no '}cp_sizes")
    cp_sizes = None
    if topology.dynamic_cp:
        cp_sizes = _integers(line, "cp_sizes", size=num_ranks * num_slots).reshape(shape)
        _check_cp_sizes(cp_sizes, slot_of=slot_of, topology=topology)
    times = {name: float(line[name]) for name in _TIMES}
    if shift > _MAX_COST_SHIFT or not all(0 <= value < float("inf") for value in times.values()):
        raise ValueError(f"cost_shift is {shift}, the times are {times}")
    return StepRecord(
        iteration=iteration,
        num_microbatches=num_slots,
        segment_lengths=segment_lengths,
        num_segments=num_segments,
        slot_of=slot_of,
        home_ranks=home_ranks,
        cost_grid=grid,
        cost_shift=shift,
        cost_model=cost_model_of(line["cost_model"]) if "cost_model" in line else cost_model,
        seconds=unmeasured(shape, cp_sizes=cp_sizes),
        cp_sizes=cp_sizes,
        **times,
    )


def cost_model_of(coefficients: Mapping[str, Any]) -> CostModel:
    """The cost model that `dataclasses.asdict` wrote."""
    windows = tuple((window, coefficient) for window, coefficient in coefficients["windows"])
    return CostModel(**{**coefficients, "windows": windows})


def _integers(
    line: Mapping[str, Any], name: str, *, size: int | None = None, below: int | None = None, bits: int = 40
) -> NDArray[np.int64]:
    values = as_integers(line[name], name=name, bits=bits)
    if size is not None and values.size != size:
        raise ValueError(f"{name} has {values.size} entries; there must be {size}")
    if below is not None and values.size and values.max() >= below:
        raise ValueError(f"{name} goes to {values.max()}; it must be at most {below - 1}")
    return values


def _check_cp_sizes(sizes: NDArray[np.int64], *, slot_of: NDArray[np.int64], topology: Topology) -> None:
    """Each group is whole: aligned leaves that share a slot; no leaf lacks a slot before its last."""
    num_slots, there = sizes.shape[1], sizes > 0
    if not np.isin(sizes, (0, *topology.dynamic_cp_sizes)).all() or (there[:, 1:] > there[:, :-1]).any():
        raise ValueError(f"cp_sizes has a size that is none of {topology.dynamic_cp_sizes}, or a gap")
    for size in topology.dynamic_cp_sizes:
        held = sizes == size
        of_nodes = held[: len(sizes) // size * size].reshape(-1, size, num_slots)
        if size * of_nodes.all(axis=1).sum() != held.sum():
            raise ValueError(f"cp_sizes has a group of {size} leaves that is not whole")
    first_leaves, of_samples = slot_of // num_slots, sizes.ravel()[slot_of]
    if not of_samples.all() or (first_leaves % of_samples).any():
        raise ValueError("slot_of has a sample that is not on the first leaf of a group")
