"""Reads the file of `megatron-balance compare --policy NAME --json` as a run that was planned and not measured.

Invariant: costs are computed again by the file's cost model, so that the plan compares with any other record.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_balance.cost.model import CostModel
from megatron_balance.errors import BalanceError
from megatron_balance.files.untrusted import parse_json
from megatron_balance.planner import as_integers, resolve_objective
from megatron_balance.record.judging import assigned_step, samples_of_ranks
from megatron_balance.record.run_record import RunInfo, RunRecord, read_record
from megatron_balance.record.step import StepRecord
from megatron_balance.record.step_checks import check_cp_sizes, check_step
from megatron_balance.topology import Limits, Topology


def read_run(path: Path) -> RunRecord:
    """A run, from the folder of a record or from the file of a plan.

    Raises:
        BalanceError: it is neither.
    """
    return read_record(path) if path.is_dir() else read_plan(path)


def read_plan(path: Path) -> RunRecord:
    """A plan as a record without measurements; step i of the file has iteration i + 1.

    Raises:
        BalanceError: the file cannot be read, or `compare --policy` did not write it.
    """
    try:
        content: Any = parse_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BalanceError(f"the plan {str(path)!r} cannot be read: {error}.") from error
    try:
        info = _info(content)
        steps = tuple(_step(step, iteration=index + 1, info=info) for index, step in enumerate(content["steps"]))
    except (ArithmeticError, AttributeError, KeyError, TypeError, IndexError, ValueError) as error:
        raise BalanceError(
            f"{str(path)!r} is no plan: make one with megatron-balance compare --policy NAME --json "
            f"({type(error).__name__}: {error})."
        ) from error
    return RunRecord(info, steps)


def _info(content: Mapping[str, Any]) -> RunInfo:
    coefficients = content["cost_model"]
    windows = tuple((window, coefficient) for window, coefficient in coefficients["windows"])
    cost_model = CostModel(**{**coefficients, "windows": windows})
    topology = Topology(**content["topology"])
    return RunInfo(
        topology=topology,
        limits=Limits(**content["limits"]),
        cost_model=cost_model,
        cost_name=str(content["cost_name"]),
        objective=resolve_objective(content["steps"][0]["metrics"]["objective"], topology=topology),
        policy="megatron-balance compare",
    )


def _step(step: Mapping[str, Any], *, iteration: int, info: RunInfo) -> StepRecord:
    lengths = as_integers(step["lengths"], name="lengths")
    ranks, num_microbatches = step["ranks"], int(step["num_microbatches"])
    dynamic = info.topology.dynamic_cp
    num_ranks = info.topology.num_leaves if dynamic else info.topology.dp_size
    # The file holds every slot, so that every size can be checked.
    slots = [len(slots) for slots in ranks]
    if len(ranks) != num_ranks or max(slots) != num_microbatches or (min(slots) < max(slots) and not dynamic):
        raise ValueError(f"step {iteration} is not of {num_ranks} ranks with {num_microbatches} micro-batches")
    slot_of = _slot_of(ranks, num_samples=lengths.size, num_microbatches=num_microbatches)
    cp_sizes = _cp_sizes(step["cp_sizes"], slots=slots) if dynamic else None
    if cp_sizes is not None:
        check_cp_sizes(cp_sizes, slot_of=slot_of, shape=(num_ranks, num_microbatches), topology=info.topology)
    planned = assigned_step(
        slot_of,
        iteration=iteration,
        num_microbatches=num_microbatches,
        segment_lengths=lengths,
        num_segments=np.ones(lengths.size, dtype=np.int64),
        home_ranks=np.arange(lengths.size, dtype=np.int64) % info.topology.dp_size,
        cost_model=info.cost_model,
        info=info,
        cp_sizes=cp_sizes,
    )
    check_step(planned, topology=info.topology)
    if dynamic and samples_of_ranks(planned) != ranks:
        raise ValueError(f"step {iteration} has a group whose leaves hold different samples")
    return planned


def _slot_of(ranks: Sequence[Sequence[Sequence[int]]], *, num_samples: int, num_microbatches: int) -> NDArray[np.int64]:
    """Slots of samples; of one that several leaves share, the first leaf's."""
    slot_of = np.full(num_samples, -1, dtype=np.int64)
    for rank in reversed(range(len(ranks))):
        for slot, ids in enumerate(ranks[rank]):
            slot_of[as_integers(ids, name="sample ids")] = rank * num_microbatches + slot
    if (slot_of < 0).any():
        raise ValueError(f"sample {int(np.argmin(slot_of))} has no rank")
    return slot_of


def _cp_sizes(of_leaves: Sequence[Sequence[int]], *, slots: Sequence[int]) -> NDArray[np.int64]:
    """`StepRecord.cp_sizes` of the lists of a file."""
    if [len(sizes) for sizes in of_leaves] != slots:
        raise ValueError("cp_sizes has other slots than ranks")
    grid = np.zeros((len(slots), max(slots)), dtype=np.int64)
    for leaf, sizes in enumerate(of_leaves):
        grid[leaf, : len(sizes)] = as_integers(sizes, name="cp_sizes")
    return grid
