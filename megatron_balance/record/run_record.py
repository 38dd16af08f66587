"""Reads the record of a run: JSON lines, each an object with a `kind`.

    run             ranks, limits, cost model, objective, what it ran on; the first line, and where a run changes them
    step            lengths of a step, slots of its samples, ranks that share each micro-batch, time spent planning
    seconds         seconds of one data-parallel rank's micro-batches in one step
    memory          the cap that would leave a tenth of every device free, by the peaks of the first steps
    policy, advice  figures of a comparison, which `compare --json` adds

A training run writes a folder: `plan.jsonl` from one rank, `seconds_rank00003.jsonl` from each rank, without
communication (`writing.py`). `compare --json FILE` writes one file. With dynamic context-parallel sizes ranks are DP×CP
ranks (`DataSchedule`). From a record a run can be planned again under another policy, and drawn.

Invariants: a line without its end is not read. A later line for the same step replaces an earlier one, and where a run
was resumed on other ranks, what was recorded before that is not read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from megatron_balance.cost.model import CostModel
from megatron_balance.errors import BalanceError, check_integer
from megatron_balance.planner import Forest, Problem, as_integers, resolve_objective
from megatron_balance.record.step import StepRecord, rows_of
from megatron_balance.topology import Limits, Topology

FORMAT = "megatron_balance record 4"
"""The format named in the first line; the number rises when its meaning changes. Every 0.x reads those of 0.2 on."""

_READ = ("megatron_balance record 3", FORMAT)
"""Formats that are read; the first is that of 0.1."""

_RENAMED = {"origin": "environment", "slot_of": "microbatch_of"}
"""Keys of format 3, and their names since."""

PLAN = "plan.jsonl"
"""The file of a record's folder that one rank writes."""

_FOREST = ("node_tokens", "parent", "node_of")
_TIMES = ("plan_seconds", "exchange_seconds", "exposed_seconds")

MAX_GPUS, MAX_STAGES = 2**20, 2**12
"""Most GPUs and pipeline stages of a record, or of ranks that are compared."""


@dataclass(frozen=True, kw_only=True)
class RunInfo:
    """The properties that all steps of a run share."""

    topology: Topology
    limits: Limits
    cost_model: CostModel
    cost_name: str  # tokens, flops or seconds
    objective: str
    policy: str  # the flags that chose it, for people
    environment: Mapping[str, Any] = field(default_factory=dict[str, Any])  # hardware, versions, and the attention rate
    row_tokens: int | None = None  # StepRecord.row_tokens of all steps
    num_rows: int | None = None  # of a step of stock

    def line(self) -> dict[str, Any]:
        """The first line of a record."""
        return {"kind": "run", "format": FORMAT, **asdict(self)}

    @classmethod
    def from_line(cls, line: Mapping[str, Any]) -> RunInfo:
        """Read what `line` wrote; KeyError, TypeError or ValueError where the line is damaged."""
        if line["format"] not in _READ:
            remedy = "install the version that wrote it, or record 20 steps anew with --balance-record"
            raise ValueError(f"it is of the format {line['format']!r}, not {FORMAT!r}: {remedy}")
        topology, environment = Topology(**line["topology"]), dict(line["environment"])
        if topology.num_gpus > MAX_GPUS or topology.pp_size * topology.vpp_size > MAX_STAGES:
            raise ValueError(f"it has {topology.num_gpus} GPUs and {topology.pp_size} pipeline stages")
        if "versions" in environment:
            environment["versions"] = dict(environment["versions"])
        return cls(
            topology=topology,
            limits=Limits(**line["limits"]),
            cost_model=CostModel.from_dict(line["cost_model"]),
            cost_name=str(line["cost_name"]),
            objective=resolve_objective(line["objective"], topology=topology),
            policy=str(line["policy"]),
            environment=environment,
            **{
                name: None if line.get(name) is None else check_integer(name, line[name])
                for name in ("row_tokens", "num_rows")
            },
        )


class RunRecord(NamedTuple):
    """A run that was recorded; its steps are in the order of iterations.

    `measured_cap`: tokens per GPU of a micro-batch that would leave a tenth of every device free; None if not known.
    """

    info: RunInfo
    steps: tuple[StepRecord, ...]
    measured_cap: int | None = None


def line_of(step: StepRecord) -> dict[str, Any]:
    """A step without its measurements, by name: numbers, and arrays of integers."""
    arrays = {"segment_lengths": step.segments, "num_segments": step.num_segments, "home_ranks": step.home_ranks}
    arrays |= {"microbatch_of": step.microbatch_of, "cp_sizes": step.cp_size_grid.ravel(), "rows": step.rows}
    arrays["image_sums"] = None if step.images is None else step.images.ravel()
    if step.forest is not None:
        arrays |= {name: getattr(step.forest, name) for name in _FOREST}
    line = {name: array for name, array in arrays.items() if array is not None}
    return {"kind": "step", "iteration": step.iteration} | line | {name: getattr(step, name) for name in _TIMES}


def step_of(line: Mapping[str, Any], *, info: RunInfo) -> StepRecord:
    """Read what `line_of` wrote; KeyError, TypeError or ValueError where the line is damaged."""
    topology, names = info.topology, ("microbatch_of", "cp_sizes", "image_sums", "rows")
    arrays = {name: as_integers(line[name], name=name) for name in names if name in line}
    problem = Problem.of(
        line["segment_lengths"],
        num_segments=line.get("num_segments"),
        image_patches=arrays["image_sums"].reshape(-1, 2) if "image_sums" in arrays else None,
        home_ranks=line.get("home_ranks"),
        forest=Forest.from_nodes(*(line[name] for name in _FOREST)) if "node_of" in line else None,
        cost_model=info.cost_model,
        topology=topology,
        limits=info.limits,
        objective=info.objective,
    )
    microbatch_of = arrays["microbatch_of"]
    sizes = arrays["cp_sizes"].reshape(topology.dp_cp_size if topology.dynamic_cp else topology.dp_size, -1)
    if microbatch_of.size != problem.lengths.size or microbatch_of.max(initial=0) >= sizes.size:
        raise ValueError(f"microbatch_of must be {problem.lengths.size} integers from 0 to {sizes.size - 1}")
    allowed = (0, *topology.dynamic_cp_sizes) if topology.dynamic_cp else (topology.cp_size,)
    if not sizes.size or not np.isin(sizes, allowed).all() or not sizes.ravel()[microbatch_of].all():
        raise ValueError(f"cp_sizes has a size that is none of {allowed}, or 0 where a sample is")
    rows = arrays.get("rows")
    if rows is not None and (rows.size != microbatch_of.size or not np.isin(np.diff(rows, prepend=-1), (0, 1)).all()):
        raise ValueError("rows do not rise from 0 by at most 1")
    if rows is None and info.row_tokens is not None and info.num_rows is not None:
        rows = rows_of(problem, row_tokens=info.row_tokens, num_rows=info.num_rows)
    times: dict[str, Any] = {name: float(line[name]) for name in _TIMES}
    return StepRecord(
        **vars(problem),
        microbatch_of=microbatch_of,
        cp_size_grid=sizes,
        iteration=check_integer("iteration", line["iteration"]),
        rows=rows,
        row_tokens=info.row_tokens,
        **times,
    )


def read_record(path: Path) -> RunRecord:
    """Read a run back from its folder, also one that was killed or still runs, or a file of `compare --json`."""
    files = [path / PLAN, *sorted(path.glob("seconds_rank*.jsonl"))] if path.is_dir() else [path]
    problem = f"{str(path)!r} is neither a run record nor a file of compare --json"
    info: RunInfo | None = None
    measured_cap: int | None = None
    steps: dict[int, StepRecord] = {}
    for file in files:
        try:
            lines = file.read_bytes().split(b"\n")[:-1]  # the last has no end, or is empty
        except OSError as error:
            raise BalanceError(f"{problem}: {error.strerror}.") from error
        for number, text in enumerate(lines, start=1):
            try:
                line: dict[str, Any] = {_RENAMED.get(name) or name: value for name, value in json.loads(text).items()}
                kind = line["kind"]
                if kind == "run":
                    before, info = info, RunInfo.from_line(line)
                    if before is not None and before.topology != info.topology:
                        steps.clear()
                elif info is None:
                    raise ValueError("the first line is not that of a run")
                elif kind == "step":
                    step = step_of(line, info=info)
                    steps[step.iteration] = step
                elif kind == "seconds":
                    _set_seconds(line, steps=steps)
                elif kind == "memory":
                    measured_cap = check_integer("measured_cap", line["measured_cap"])
            except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
                damage = f"line {number} is damaged ({type(error).__name__}: {error})"
                if info is None:
                    raise BalanceError(f"{problem}: {damage}.") from error
                raise BalanceError(f"{str(file)!r}, {damage}: remove the line to read the others.") from error
    if info is None:
        raise BalanceError(f"{problem}: the file is empty.")
    # A run that learns its costs has planned its first steps by others: all are judged by the newest.
    newest = (replace(steps[iteration], cost_model=info.cost_model) for iteration in sorted(steps))
    return RunRecord(info, tuple(newest), measured_cap)


def is_record(path: Path) -> bool:
    """True for a folder, and for a file that begins as a record does."""
    if not path.is_file():
        return path.is_dir()
    with path.open("rb") as file:
        return file.read(64).startswith(f'{{"kind": "run", "format": "{FORMAT[:-1]}'.encode())


def _set_seconds(line: Mapping[str, Any], *, steps: Mapping[int, StepRecord]) -> None:
    """Put the seconds of a rank into their step; seconds of an unknown step, or of other slots, have no effect."""
    seconds = np.array([np.nan if value is None else value for value in line["seconds"]], dtype=float)
    if np.isinf(seconds).any() or (seconds < 0).any():
        raise ValueError("seconds are infinite, or below 0")
    rank, step = check_integer("rank", line["rank"], minimum=0), steps.get(line["iteration"])
    if step is not None and rank < len(step.seconds):
        exists = step.cp_size_grid[rank] > 0
        if seconds.shape == (exists.sum(),):
            step.seconds[rank, exists] = seconds
