"""Reads the record of a run: JSON lines, each an object with a `kind`.

    run             ranks, limits, cost model, objective, what it ran on; the first line
    step            lengths of a step, slots of its samples, predicted costs, time spent planning
    seconds         seconds of one data-parallel rank's micro-batches in one step
    policy, advice  figures of a comparison, which `compare --json` adds

A training run writes a folder: `plan.jsonl` from one rank, `seconds_rank00003.jsonl` from each rank, without
communication. `compare --json FILE` writes one file. With dynamic context-parallel sizes ranks are leaves
(`DataSchedule`). From a record a run can be planned again under another policy, and drawn.

Invariants: a later line for the same step replaces an earlier one. A last line without its end, as a killed run leaves
it, is not read.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import KW_ONLY, asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_balance.cost.model import CostModel
from megatron_balance.errors import BalanceError
from megatron_balance.planner import resolve_objective
from megatron_balance.record.step import StepRecord, cost_model_of, step_of
from megatron_balance.topology import Limits, Topology

FORMAT = "megatron_balance record 2"
"""The format named in the first line; the number rises when its meaning changes."""

PLAN = "plan.jsonl"
"""The file of a record's folder that one rank writes."""


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


def read_record(path: Path) -> RunRecord:
    """Read a run back, also one that was killed or still runs, or a plan.

    Args:
        path: folder of a record, or a file of `compare --json`.

    Raises:
        BalanceError: there is no record, or a line of it is damaged.
    """
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
                    step = step_of(line, cost_model=info.cost_model, topology=info.topology)
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
    num_slots = step.num_microbatches if step.cp_sizes is None else int((step.cp_sizes[rank] > 0).sum())
    if seconds.size == num_slots:
        step.seconds[rank, :num_slots] = seconds
