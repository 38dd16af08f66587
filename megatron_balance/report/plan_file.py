"""The file that `megatron-balance plan --json` writes, read as a run that was planned and not measured.

Invariant: what is read is judged anew by the file's cost model, so that it compares with any other record.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_balance.errors import BalanceError
from megatron_balance.planner.cost import CostModel
from megatron_balance.planner.topology import Limits, Topology
from megatron_balance.report.judging import assigned_step
from megatron_balance.report.record import RunInfo, RunRecord, StepRecord, read_record


def read_run(path: Path) -> RunRecord:
    """A run, from the folder of a record or from the file of a plan.

    Raises:
        BalanceError: it is neither.
    """
    return read_record(path) if path.is_dir() else read_plan(path)


def read_plan(path: Path) -> RunRecord:
    """A plan as a record without measurements; step i of the file has iteration i + 1.

    Raises:
        BalanceError: the file cannot be read, or `plan --json` did not write it.
    """
    try:
        content: Any = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BalanceError(f"the plan {str(path)!r} cannot be read: {error}.") from error
    try:
        info = _info(content)
        steps = tuple(_step(step, iteration=index + 1, info=info) for index, step in enumerate(content["steps"]))
    except (KeyError, TypeError, IndexError, ValueError) as error:
        raise BalanceError(
            f"{str(path)!r} is no plan: make one with megatron-balance plan --json ({type(error).__name__}: {error})."
        ) from error
    return RunRecord(info, steps)


def _info(content: Mapping[str, Any]) -> RunInfo:
    coefficients = content["cost_model"]
    windows = tuple((window, coefficient) for window, coefficient in coefficients["windows"])
    cost_model = CostModel(**{**coefficients, "windows": windows})
    return RunInfo(
        topology=Topology(**content["topology"]),
        limits=Limits(**content["limits"]),
        cost_model=cost_model,
        cost_name=content["cost_name"],
        objective=content["steps"][0]["metrics"]["objective"],
        policy="megatron-balance plan",
    )


def _step(step: Mapping[str, Any], *, iteration: int, info: RunInfo) -> StepRecord:
    lengths = np.array(step["lengths"], dtype=np.int64)
    num_microbatches = int(step["num_microbatches"])
    return assigned_step(
        _slot_of(step["ranks"], num_samples=lengths.size, num_microbatches=num_microbatches),
        iteration=iteration,
        num_microbatches=num_microbatches,
        segment_lengths=lengths,
        num_segments=np.ones(lengths.size, dtype=np.int64),
        home_ranks=np.arange(lengths.size, dtype=np.int64) % info.topology.dp_size,
        cost_model=info.cost_model,
        info=info,
    )


def _slot_of(ranks: Sequence[Sequence[Sequence[int]]], *, num_samples: int, num_microbatches: int) -> NDArray[np.int64]:
    slot_of = np.full(num_samples, -1, dtype=np.int64)
    for rank, slots in enumerate(ranks):
        for slot, ids in enumerate(slots):
            slot_of[list(ids)] = rank * num_microbatches + slot
    if (slot_of < 0).any():
        raise ValueError(f"sample {int(np.argmin(slot_of))} has no rank")
    return slot_of
