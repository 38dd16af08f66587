"""Writes and reads the record of a run: JSON lines, each an object with a `kind`.

    run             ranks, limits, cost model, objective, what it ran on; the first line
    step            lengths of a step, slots of its samples, predicted costs, time spent planning
    seconds         seconds of one data-parallel rank's micro-batches in one step
    policy, advice  figures of a comparison, which `compare --json` adds

A training run writes a folder: `plan.jsonl` from one rank, `seconds_rank00003.jsonl` from each rank, without
communication. `compare --json FILE` writes one file. With dynamic context-parallel sizes ranks are leaves
(`DataSchedule`). From a record a run can be planned again under another policy, and drawn.

Invariants: a line is handed to the system whole before the next step, without a thread or a message, so that a killed
process loses at most its last one; a last line without its end is not read. A later line for the same step replaces an
earlier one.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import KW_ONLY, asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_balance.cost.model import CostModel
from megatron_balance.errors import BalanceError
from megatron_balance.planner import Problem, as_integers, resolve_objective
from megatron_balance.record.step import StepRecord, unmeasured
from megatron_balance.topology import Limits, Topology

FORMAT = "megatron_balance record 2"
"""The format named in the first line; the number rises when its meaning changes."""

PLAN = "plan.jsonl"
"""The file of a record's folder that one rank writes."""


_MAX_COST_SHIFT = 1024
_TIMES = ("plan_seconds", "exchange_seconds", "exposed_seconds")

_MAX_LINE = 2**26
"""Bytes at the end of a file in which its last line begins."""


@dataclass(frozen=True)
class RunInfo:
    """The properties that all steps of a run share.

    Attributes:
        topology: the ranks.
        limits: token or sample cap of a micro-batch.
        cost_model: cost of a sample, as the run began.
        cost_name: `tokens`, `flops` or `seconds`.
        objective: when ranks wait for one another.
        policy: the flags that chose it, for people.
        origin: hardware and versions (`runtime.process.environment`), for people.
    """

    _: KW_ONLY
    topology: Topology
    limits: Limits
    cost_model: CostModel
    cost_name: str
    objective: str
    policy: str
    origin: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def line(self) -> dict[str, Any]:
        """The first line of a record."""
        return {"kind": "run", "format": FORMAT, **asdict(self)}

    @classmethod
    def of_line(cls, line: Mapping[str, Any]) -> RunInfo:
        """What `line` wrote. Raises KeyError, TypeError or ValueError where it cannot be."""
        if line["format"] != FORMAT:
            raise ValueError(f"it is of the format {line['format']!r}, not {FORMAT!r}: another version wrote it")
        topology, origin = Topology(**line["topology"]), dict(line["origin"])
        if "versions" in origin:
            origin["versions"] = dict(origin["versions"])
        return cls(
            topology=topology,
            limits=Limits(**line["limits"]),
            cost_model=cost_model_of(line["cost_model"]),
            cost_name=str(line["cost_name"]),
            objective=resolve_objective(line["objective"], topology=topology),
            policy=str(line["policy"]),
            origin=origin,
        )


@dataclass(frozen=True)
class RunRecord:
    """A run that was recorded.

    Attributes:
        info: properties of all steps.
        steps: in the order of iterations.
    """

    info: RunInfo
    steps: tuple[StepRecord, ...]


def line_of(step: StepRecord, *, cost_model: CostModel) -> dict[str, Any]:
    """A step without its measurements, as JSON. `cost_model`: the run's; a step with the same one leaves it out."""
    line: dict[str, Any] = {"kind": "step", "iteration": step.iteration, "num_microbatches": step.num_microbatches}
    line["segment_lengths"] = step.segments.tolist()
    if step.num_segments is not None and (step.num_segments != 1).any():
        line["num_segments"] = step.num_segments.tolist()
    homes = np.zeros_like(step.slot_of) if step.home_ranks is None else step.home_ranks
    line |= {"slot_of": step.slot_of.tolist(), "home_ranks": homes.tolist()}
    line |= {"cost_grid": step.cost_grid.ravel().tolist(), "cost_shift": step.cost_shift}
    if step.topology.dynamic_cp:
        line["cp_sizes"] = step.cp_size_grid.ravel().tolist()
    if step.cost_model != cost_model:
        line["cost_model"] = asdict(step.cost_model)
    return line | {name: getattr(step, name) for name in _TIMES}


def step_of(line: Mapping[str, Any], *, info: RunInfo) -> StepRecord:
    """The step that `line_of` wrote. Raises KeyError, TypeError or ValueError where it cannot be."""
    topology, numbers = info.topology, {name: line[name] for name in ("iteration", "num_microbatches", "cost_shift")}
    for name, value in numbers.items():
        if type(value) is not int or value < {"num_microbatches": 1}.get(name, 0):
            raise ValueError(f"{name} is {value!r}")
    problem = Problem.of(
        line["segment_lengths"],
        num_segments=line.get("num_segments"),
        home_ranks=line["home_ranks"],
        cost_model=cost_model_of(line["cost_model"]) if "cost_model" in line else info.cost_model,
        topology=topology,
        limits=info.limits,
        objective=info.objective,
    )
    num_rows = topology.num_leaves if topology.dynamic_cp else topology.dp_size
    shape = (num_rows, numbers["num_microbatches"])

    def integers(name: str, *, size: int, bits: int = 40) -> NDArray[np.int64]:
        values = as_integers(line[name], name=name, bits=bits)
        if values.size != size:
            raise ValueError(f"{name} has {values.size} entries; there must be {size}")
        return values

    grid = integers("cost_grid", size=shape[0] * shape[1], bits=61).reshape(shape)
    slot_of = integers("slot_of", size=problem.lengths.size)
    if slot_of.max(initial=0) >= grid.size:
        raise ValueError(f"slot_of goes to {slot_of.max()}; it must be at most {grid.size - 1}")
    if ("cp_sizes" in line) != topology.dynamic_cp:
        raise ValueError(f"it has {'' if 'cp_sizes' in line else 'no '}cp_sizes")
    sizes = np.full(shape, topology.cp_size, dtype=np.int64)
    if topology.dynamic_cp:
        sizes = integers("cp_sizes", size=grid.size).reshape(shape)
        _check_cp_sizes(sizes, slot_of=slot_of, topology=topology)
    times: dict[str, Any] = {name: float(line[name]) for name in _TIMES}
    if numbers["cost_shift"] > _MAX_COST_SHIFT or not all(0 <= value < float("inf") for value in times.values()):
        raise ValueError(f"cost_shift is {numbers['cost_shift']}, the times are {times}")
    samples = {field.name: getattr(problem, field.name) for field in fields(Problem)}
    if not np.any(problem.home_ranks):
        samples["home_ranks"] = None  # they were not known
    placed = {"slot_of": slot_of, "cp_size_grid": sizes, "cost_grid": grid, "seconds": unmeasured(sizes)}
    return StepRecord(**samples, **numbers, **placed, **times)


def cost_model_of(coefficients: Mapping[str, Any]) -> CostModel:
    """The cost model that `dataclasses.asdict` wrote."""
    windows = tuple((window, coefficient) for window, coefficient in coefficients["windows"])
    return CostModel(**{**coefficients, "windows": windows})


def _check_cp_sizes(sizes: NDArray[np.int64], *, slot_of: NDArray[np.int64], topology: Topology) -> None:
    """Each group is whole: aligned leaves that share a slot; no leaf lacks a slot before its last."""
    num_slots, there = sizes.shape[1], sizes > 0
    if not np.isin(sizes, (0, *topology.dynamic_cp_sizes)).all() or (there[:, 1:] > there[:, :-1]).any():
        raise ValueError(f"cp_sizes has a size that is none of {topology.dynamic_cp_sizes}, or a gap")
    for size in topology.dynamic_cp_sizes:
        members = np.add.reduceat(sizes == size, np.arange(0, len(sizes), size), axis=0, dtype=np.int64)
        if not np.isin(members, (0, size)).all():
            raise ValueError(f"cp_sizes has a group of {size} leaves that is not whole")
    first_leaves, of_samples = slot_of // num_slots, sizes.ravel()[slot_of]
    if not of_samples.all() or (first_leaves % of_samples).any():
        raise ValueError("slot_of has a sample that is not on the first leaf of a group")


def read_record(path: Path) -> RunRecord:
    """Read a run back from its folder, also one that was killed or still runs, or a file of `compare --json`."""
    files = [path / PLAN, *sorted(path.glob("seconds_rank*.jsonl"))] if path.is_dir() else [path]
    info: RunInfo | None = None
    steps: dict[int, StepRecord] = {}
    for file in files:
        for number, text in _lines(file, of=path):
            try:
                line = json.loads(text)
                kind = line["kind"]
                if kind == "run":
                    info = RunInfo.of_line(line)
                elif info is None:
                    raise ValueError("the first line is not that of a run")
                elif kind == "step":
                    step = step_of(line, info=info)
                    steps[step.iteration] = step
                elif kind == "seconds":
                    _take_seconds(line, steps=steps)
            except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
                said = f"line {number} is damaged ({type(error).__name__}: {error})"
                if info is None:
                    raise BalanceError(
                        f"{str(path)!r} is no record of a run, nor a file of compare --json: {said}."
                    ) from error
                raise BalanceError(f"{str(file)!r}, {said}: remove the line to read the others.") from error
    if info is None:
        raise BalanceError(f"{str(path)!r} is no record of a run, nor a file of compare --json: it holds no line.")
    return RunRecord(info, tuple(steps[iteration] for iteration in sorted(steps)))


def is_record(path: Path) -> bool:
    """True for a folder, and for a file that begins as a record does."""
    if path.is_dir():
        return True
    try:
        with path.open("rb") as file:
            return file.read(64).startswith(f'{{"kind": "run", "format": "{FORMAT[:-1]}'.encode())
    except OSError:
        return False


def _lines(file: Path, *, of: Path) -> Iterator[tuple[int, bytes]]:
    """Line numbers from 1 and lines that have an end."""
    try:
        with file.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if line.endswith(b"\n"):
                    yield number, line
    except OSError as error:
        raise BalanceError(
            f"{str(of)!r} is no record of a run, nor a file of compare --json: {error.strerror}."
        ) from error


def _take_seconds(line: Mapping[str, Any], *, steps: Mapping[int, StepRecord]) -> None:
    """Puts the seconds of a rank into their step; a step that is not there, or has other slots, is left alone."""
    seconds: NDArray[np.float64] = np.array(
        [np.nan if value is None else value for value in line["seconds"]], dtype=float
    )
    if seconds.ndim != 1 or np.isinf(seconds).any() or (seconds < 0).any():
        raise ValueError("seconds are infinite, or below 0")
    rank, iteration = line["rank"], line["iteration"]
    if type(rank) is not int or type(iteration) is not int or rank < 0:
        raise ValueError(f"rank is {rank!r}, iteration {iteration!r}")
    step = steps.get(iteration)
    if step is None or rank >= len(step.seconds):
        return
    num_slots = int((step.cp_size_grid[rank] > 0).sum())
    if seconds.size == num_slots:
        step.seconds[rank, :num_slots] = seconds


def text_of(line: Mapping[str, Any]) -> bytes:
    """A line of a record."""
    return json.dumps(line, allow_nan=False).encode() + b"\n"


class _Lines:
    """Appends lines to a file; with `resume` after the last whole line that is there, else anew."""

    def __init__(self, path: Path, *, resume: bool) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a+b" if resume else "wb", buffering=0)
        if resume:
            # A killed run may have left the beginning of a line.
            start = self._file.seek(max(self._file.seek(0, os.SEEK_END) - _MAX_LINE, 0))
            self._file.truncate(start + self._file.readall().rfind(b"\n") + 1)

    def append(self, line: Mapping[str, Any]) -> None:
        """Write one line."""
        text = memoryview(text_of(line))
        while text:
            text = text[self._file.write(text) :]


class PlanWriter:
    """Writes the plans of a run into the folder of its record; with `resume` after the steps that are there."""

    def __init__(self, folder: Path, *, info: RunInfo, resume: bool = False) -> None:
        if resume:
            _set_aside(folder, info=info)
        self._lines = _Lines(folder / PLAN, resume=resume)
        self._cost_model = info.cost_model
        self._lines.append(info.line())

    def add(self, step: StepRecord) -> None:
        """Write one step."""
        self._lines.append(line_of(step, cost_model=self._cost_model))


def _set_aside(folder: Path, *, info: RunInfo) -> None:
    """Move the record of the same run on other ranks, before it was resumed, to a record of its own: `earlier_N`.

    A record is of one topology. Other ranks open their files with their first step, after this.
    """
    path = folder / PLAN
    if not path.exists():
        return
    with path.open("rb") as lines:
        try:
            if RunInfo.of_line(json.loads(lines.readline())).topology == info.topology:
                return
        except (LookupError, TypeError, ValueError):
            pass  # of another version, or cut off
    aside = folder / f"earlier_{len(list(folder.glob('earlier_*')))}"
    aside.mkdir()
    for moved in [path, *folder.glob("seconds_rank*.jsonl")]:
        moved.rename(aside / moved.name)


class SecondsWriter:
    """Writes the measured seconds of one data-parallel rank's micro-batches, with dynamic sizes of one leaf's."""

    def __init__(self, folder: Path, *, dp_rank: int, resume: bool = False) -> None:
        self._path = folder / f"seconds_rank{dp_rank:05d}.jsonl"
        self._rank = dp_rank
        self._resume = resume
        self._lines: _Lines | None = None
        folder.mkdir(parents=True, exist_ok=True)
        if not resume:
            self._path.unlink(missing_ok=True)

    def add(self, iteration: int, *, seconds: NDArray[np.float64]) -> None:
        """Write one step: `[num_microbatches]` seconds, to nine digits; NaN where a micro-batch was not measured."""
        if self._lines is None:  # the first rank may move earlier files away until the first step has run
            self._lines = _Lines(self._path, resume=self._resume)
        values = [None if math.isnan(value) else float(f"{value:.9g}") for value in seconds.tolist()]
        self._lines.append({"kind": "seconds", "iteration": iteration, "rank": self._rank, "seconds": values})
