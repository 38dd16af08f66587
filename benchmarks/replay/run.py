"""The steps of one setup, replayed within a time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.replay.length_sets import draw_batches
from benchmarks.replay.policies import plan_all
from benchmarks.replay.report import SetupReplay
from benchmarks.replay.setups import ReplaySetup
from benchmarks.replay.steps import ReplayedStep, Stopwatch, Timer, replay_step
from megatron_balance.cost.calibration import Calibration

Batch = tuple[str, NDArray[np.int64]]
"""Name of a length set, and `[global_batch_size]` tokens."""


def replay_setup(
    setup: ReplaySetup,
    *,
    timer: Timer,
    calibration: Calibration,
    batches: Sequence[Batch],
    repeats: int,
    seconds: float,
    announce: Callable[[str], None] = lambda line: None,
) -> SetupReplay:
    """Replays the steps of one setup until they or the time are up; a step that began is finished."""
    stopwatch = Stopwatch(timer, repeats=repeats)
    steps: list[ReplayedStep] = []
    started = time.monotonic()
    for number, (lengths, batch) in enumerate(batches):
        plans = plan_all(batch, setup=setup, calibration=calibration)
        steps += replay_step(
            batch, lengths=lengths, plans=plans, setup=setup, stopwatch=stopwatch, calibration=calibration
        )
        spent = time.monotonic() - started
        announce(f"{setup.name}: step {number + 1} of {len(batches)} ({lengths}), {spent:.0f} s")
        if spent > seconds:
            announce(f"{setup.name}: its part of the time budget is spent")
            break
    return SetupReplay(setup, calibration=calibration, steps=steps, microbatches=stopwatch.measured)


def batches_in_turn(
    names: Sequence[str], *, setup: ReplaySetup, num_steps: int, lengths_folder: Path | None
) -> Iterator[Batch]:
    """`num_steps` global batches: the first of every length set, then the second of every one, and so on."""
    each = -(-num_steps // len(names))
    drawn = {name: draw_batches(name, setup=setup, num_batches=each, lengths_folder=lengths_folder) for name in names}
    for step in range(num_steps):
        name = names[step % len(names)]
        yield name, drawn[name][step // len(names)]
