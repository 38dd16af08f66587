"""Other turns of a run that is saved: each trains in an empty folder and returns what is wrong, or nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.equality.cases import GLOBAL_BATCH_SIZE, NUM_STEPS
from benchmarks.resume.cases import SAVE_INTERVAL, STEPS, Case
from benchmarks.resume.killed import compare, newest_checkpoint, run_ranks, steps_of

CASE = Case("by FLOPs", ranks=2, ranks_after=2, overlap=True)
IN_BACKGROUND = "--ckpt-format torch_dist --async-save --async-strategy mcore --use-persistent-ckpt-worker"

WholeOf = Callable[..., list[dict[str, Any]]]
"""Trains, or remembers, the run of a case that nothing happens to; its steps."""


def saved_in_background(folder: Path, data: str, whole_of: WholeOf) -> str:
    """--async-save: another process writes the checkpoint while steps go on."""
    flags = f"{_saving(data=data, folder=folder)} {IN_BACKGROUND}"
    run = run_ranks(folder / "run", flags=f"{flags} --exit-interval {2 * SAVE_INTERVAL + 1}", num_ranks=2)
    if "scheduled an async checkpoint save" not in run.output:
        return "no checkpoint was saved in the background"
    start = newest_checkpoint(folder / "checkpoints")
    resumed = steps_of(folder / "resumed", flags=f"{flags} --load {folder / 'checkpoints'}", num_ranks=2)
    return compare(resumed, whole=whole_of(CASE, data=data), start=start, bit_for_bit=True).problem


def counted_in_samples(folder: Path, data: str, whole_of: WholeOf) -> str:
    in_samples = f"--train-samples {NUM_STEPS * GLOBAL_BATCH_SIZE}"
    flags = _saving(data=data, folder=folder).replace(STEPS, in_samples)
    steps_of(folder / "run", flags=f"{flags} --exit-interval {SAVE_INTERVAL}", num_ranks=2)
    resumed = steps_of(folder / "resumed", flags=f"{flags} --load {folder / 'checkpoints'}", num_ranks=2)
    return compare(resumed, whole=whole_of(CASE, data=data), start=SAVE_INTERVAL, bit_for_bit=True).problem


MISHAPS: dict[str, Callable[[Path, str, WholeOf], str]] = {
    "--async-save": saved_in_background,
    "--train-samples": counted_in_samples,
}
"""By their names in the table."""


def _saving(*, data: str, folder: Path) -> str:
    return f"{CASE.flags} {data} --save {folder / 'checkpoints'} --save-interval {SAVE_INTERVAL}"
