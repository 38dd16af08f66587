"""Writes the record of a run while it runs, a chunk of steps a file (`run_record.py` describes the files).

Invariants: a file is written once and whole; steps that are in no file yet are written by `flush()`; no thread, no
communication.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from megatron_balance.errors import BalanceError
from megatron_balance.files.atomic_write import atomic_write
from megatron_balance.record.run_record import PER_STEP, RAGGED, RunInfo
from megatron_balance.record.step import StepRecord

CHUNK_STEPS = 64
"""Steps a file holds."""

Step = TypeVar("Step")


class _ChunkWriter(Generic[Step]):
    """Collects steps and writes them to numbered files.

    Args:
        folder: of the record.
        prefix: of the files' names.
        resume: go on after the files that are there; else they are an earlier run's and are removed.
    """

    def __init__(self, folder: Path, *, prefix: str, resume: bool) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._prefix = prefix
        self._steps: list[Step] = []
        earlier = sorted(folder.glob(f"{prefix}_*.npz"))
        self._num_chunks = int(earlier[-1].stem.rsplit("_", 1)[1]) + 1 if resume and earlier else 0
        for path in () if resume else earlier:
            path.unlink()

    def _take(self, step: Step) -> None:
        self._steps.append(step)
        if len(self._steps) == CHUNK_STEPS:
            self.flush()

    def flush(self) -> None:
        """Write what has not been written."""
        if not self._steps:
            return
        steps, self._steps = self._steps, []
        path = self._folder / f"{self._prefix}_{self._num_chunks:05d}.npz"
        self._num_chunks += 1
        with atomic_write(path) as file:
            np.savez_compressed(file, **self._arrays(steps))

    def _arrays(self, steps: list[Step]) -> dict[str, Any]:
        raise NotImplementedError


class PlanWriter(_ChunkWriter[StepRecord]):
    """Writes the plans of a run.

    Args:
        folder: of the record.
        info: written at once.
        resume: go on after the files that are there; else they are an earlier run's and are removed.
    """

    def __init__(self, folder: Path, *, info: RunInfo, resume: bool = False) -> None:
        if resume:
            _set_aside(folder, info=info)
        info.write(folder)
        super().__init__(folder, prefix="plans", resume=resume)

    def add(self, step: StepRecord) -> None:
        """Add one step; a file is written every `CHUNK_STEPS`."""
        self._take(step)

    def _arrays(self, steps: list[StepRecord]) -> dict[str, Any]:
        arrays: dict[str, Any] = {name: np.array([getattr(step, name) for step in steps]) for name in PER_STEP}
        arrays |= {name: np.concatenate([getattr(step, name).ravel() for step in steps]) for name in RAGGED}
        sizes = [step.cp_sizes.ravel() for step in steps if step.cp_sizes is not None]
        if sizes:
            arrays["cp_sizes"] = np.concatenate(sizes)
        arrays["num_samples"] = np.array([step.slot_of.size for step in steps])
        arrays["dp_size"] = np.array([step.cost_grid.shape[0] for step in steps])
        arrays["cost_model"] = np.array([json.dumps(asdict(step.cost_model)) for step in steps])
        return arrays


def _set_aside(folder: Path, *, info: RunInfo) -> None:
    """Move the record of the same run on other ranks, before it was resumed, to a record of its own: `earlier_N`.

    A record is of one topology. Other ranks may be listing the folder meanwhile; none writes yet.
    """
    try:
        earlier = RunInfo.read(folder)
    except BalanceError:
        return
    if earlier.topology == info.topology:
        return
    aside = folder / f"earlier_{len(list(folder.glob('earlier_*')))}"
    aside.mkdir()
    for pattern in ("run.json", "plans_*.npz", "seconds_rank*.npz"):
        for path in folder.glob(pattern):
            path.rename(aside / path.name)


class SecondsWriter(_ChunkWriter[tuple[int, NDArray[np.float64]]]):
    """Writes the measured seconds of one data-parallel rank's micro-batches, or of one leaf's.

    Args:
        folder: of the record.
        dp_rank: of this rank; its leaf with dynamic context-parallel sizes.
        resume: as for PlanWriter, of this rank's files.
    """

    def __init__(self, folder: Path, *, dp_rank: int, resume: bool = False) -> None:
        super().__init__(folder, prefix=f"seconds_rank{dp_rank:05d}", resume=resume)

    def add(self, iteration: int, *, seconds: NDArray[np.float64]) -> None:
        """Add one step: `[num_microbatches]` seconds."""
        self._take((iteration, seconds))

    def _arrays(self, steps: list[tuple[int, NDArray[np.float64]]]) -> dict[str, Any]:
        return {
            "iteration": np.array([iteration for iteration, _ in steps]),
            "num_microbatches": np.array([seconds.size for _, seconds in steps]),
            "seconds": np.concatenate([seconds for _, seconds in steps]).astype(np.float32),
        }
