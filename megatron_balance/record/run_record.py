"""Reads and describes the record of a run: every step's lengths, plan and measured seconds, in a folder of small files.

    run.json                     ranks, limits, cost model, what it ran on
    plans_00000.npz              of many steps: lengths, slots of samples, predicted costs, time spent planning
    seconds_rank00003_00000.npz  seconds of the micro-batches of one data-parallel rank

With dynamic context-parallel sizes ranks are leaves (`DataSchedule`), and plans have the array `cp_sizes`.

One rank writes the plans, every rank its own seconds, without communication. From a record a run can be
planned again under another policy, and drawn.

Invariants: `read_record(folder)` returns what the writers were given; files are numpy's own, without
pickled objects; a killed run loses only its last, unwritten chunk.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_balance.cost.model import CostModel
from megatron_balance.errors import BalanceError
from megatron_balance.files.untrusted import opened_archive, parse_json
from megatron_balance.planner import resolve_objective
from megatron_balance.record.step import StepRecord, unmeasured
from megatron_balance.record.step_checks import check_seconds, check_step, cut
from megatron_balance.topology import Limits, Topology

FORMAT = "megatron_balance record 1"
"""The format named in run.json; the number rises when its meaning changes."""


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
        origin: hardware and versions (`runtime.environment`), for people.
    """

    _: KW_ONLY
    topology: Topology
    limits: Limits
    cost_model: CostModel
    cost_name: str
    objective: str
    policy: str
    origin: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def write(self, folder: Path) -> None:
        """Write run.json."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "run.json").write_text(json.dumps({"format": FORMAT, **asdict(self)}, indent=1) + "\n")

    @classmethod
    def read(cls, folder: Path) -> RunInfo:
        """Read run.json.

        Raises:
            BalanceError: there is none, or it is of another format.
        """
        path = folder / "run.json"
        try:
            content: Any = parse_json(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise BalanceError(f"{str(folder)!r} is no record of a run: {error}.") from error
        if not isinstance(content, dict) or content.pop("format", None) != FORMAT:
            raise BalanceError(f"{str(path)!r} is not of the format {FORMAT!r}: it was written by another version.")
        try:
            topology = Topology(**content["topology"])
            read = {
                "topology": topology,
                "limits": Limits(**content["limits"]),
                "cost_model": _cost_model(content["cost_model"]),
                "objective": resolve_objective(content["objective"], topology=topology),
                "cost_name": str(content["cost_name"]),
                "policy": str(content["policy"]),
                "origin": _origin(content.get("origin", {})),
            }
            return cls(**content | read)
        except (KeyError, TypeError, ValueError) as error:
            raise BalanceError(f"{str(path)!r} is damaged ({type(error).__name__}: {error}).") from error


@dataclass(frozen=True)
class RunRecord:
    """A run that was recorded.

    Attributes:
        info: properties of all steps.
        steps: in the order of iterations.
    """

    info: RunInfo
    steps: tuple[StepRecord, ...]


def read_record(folder: Path) -> RunRecord:
    """Read a run back, also one that was killed or still runs.

    Raises:
        BalanceError: the folder holds no record, or a file of it is damaged.
    """
    info = RunInfo.read(folder)
    steps: dict[int, StepRecord] = {}
    for path in sorted(folder.glob("plans_*.npz")):
        with _opened(path) as chunk:
            for step in _steps_of(chunk):
                check_step(step, topology=info.topology)
                steps[step.iteration] = step
    for path in sorted(folder.glob("seconds_rank*.npz")):
        with _opened(path) as chunk:
            dp_rank = int(path.name.split("_")[1].removeprefix("rank"))
            of_steps = cut(chunk["seconds"], sizes=chunk["num_microbatches"])
            for iteration, seconds in zip(chunk["iteration"].tolist(), of_steps, strict=True):
                check_seconds(seconds)
                step = steps.get(iteration)
                if step is not None and 0 <= dp_rank < len(step.seconds) and seconds.size == _num_slots(step, dp_rank):
                    step.seconds[dp_rank, : seconds.size] = seconds
    return RunRecord(info, tuple(steps[iteration] for iteration in sorted(steps)))


def _num_slots(step: StepRecord, rank: int) -> int:
    return step.num_microbatches if step.cp_sizes is None else int((step.cp_sizes[rank] > 0).sum())


@contextmanager
def _opened(path: Path) -> Iterator[Mapping[str, NDArray[Any]]]:
    try:
        with opened_archive(path) as chunk:
            yield chunk
    except (OSError, ValueError) as error:
        raise BalanceError(f"{str(path)!r} is damaged ({error}): the others can be read without it.") from error


def _origin(content: Mapping[str, Any]) -> Mapping[str, Any]:
    versions = {"versions": dict(content["versions"])} if "versions" in content else {}
    return {**content, **versions}


def _cost_model(coefficients: Mapping[str, Any]) -> CostModel:
    windows = tuple((window, coefficient) for window, coefficient in coefficients["windows"])
    return CostModel(**{**coefficients, "windows": windows})


PER_STEP = (
    "iteration",
    "num_microbatches",
    "cost_shift",
    "plan_seconds",
    "exchange_seconds",
    "exposed_seconds",
)
"""Numbers of a step: one array over the steps of a file."""

RAGGED = ("segment_lengths", "num_segments", "slot_of", "home_ranks", "cost_grid")
"""Arrays of a step, joined end to end over the steps of a file."""


def _steps_of(chunk: Mapping[str, NDArray[Any]]) -> Sequence[StepRecord]:
    num_samples = chunk["num_samples"]
    of_samples = {name: cut(chunk[name], sizes=num_samples) for name in ("num_segments", "slot_of", "home_ranks")}
    num_segments = np.array([counts.sum() for counts in of_samples["num_segments"]])
    segments = cut(chunk["segment_lengths"], sizes=num_segments)
    shapes = list(zip(chunk["dp_size"].tolist(), chunk["num_microbatches"].tolist(), strict=True))
    cells = np.array([num_ranks * slots for num_ranks, slots in shapes])
    grids = cut(chunk["cost_grid"], sizes=cells)
    cp_sizes = cut(chunk["cp_sizes"], sizes=cells) if "cp_sizes" in chunk else None
    steps: list[StepRecord] = []
    for index, shape in enumerate(shapes):
        values: dict[str, Any] = {name: chunk[name][index].item() for name in PER_STEP}
        values |= {name: of_sample[index] for name, of_sample in of_samples.items()}
        values |= {"segment_lengths": segments[index], "cost_grid": grids[index].reshape(shape)}
        values |= {"cost_model": _cost_model(parse_json(chunk["cost_model"][index].item()))}
        if cp_sizes is not None:
            values["cp_sizes"] = cp_sizes[index].reshape(shape)
        steps.append(StepRecord(**values, seconds=unmeasured(shape, cp_sizes=values.get("cp_sizes"))))
    return steps
