"""Other mishaps of checkpoints: a rank dies while it writes, files are damaged, folders are used again.

Each of `MISHAPS` trains in an empty folder and returns what is wrong, empty where nothing is.
"""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from training_run import RunFailed

from benchmarks.equality.cases import GLOBAL_BATCH_SIZE, NUM_STEPS
from benchmarks.resume.cases import STEPS, Case
from benchmarks.resume.elastic import node_lost
from benchmarks.resume.killed import compare, newest_checkpoint, run_ranks, steps_of
from megatron_balance.mcore.checkpoint import state_folder

AHEAD = Case("look-ahead 3", ranks=2, ranks_after=2, overlap=True)
IN_ORDER = Case("by FLOPs", ranks=2, ranks_after=2, overlap=True)
SAVED_AT = 3

IN_BACKGROUND = "--ckpt-format torch_dist --async-save --async-strategy mcore --use-persistent-ckpt-worker"

Steps = list[dict[str, Any]]


class WholeOf(Protocol):
    """Trains, or remembers, the run of a case that nothing happens to."""

    def __call__(self, case: Case, *, data: str) -> Steps:
        """Its steps."""
        ...


Mishap = Callable[[Path, str, WholeOf], str]


def dies_while_writing(folder: Path, data: str, whole_of: WholeOf) -> str:
    """Rank 1 is killed when half of its samples of iteration 6 are on the disk."""
    flags = _saving(AHEAD, data=data, folder=folder)
    try:
        with _killed_in(".pool_rank00001.npz.part", iteration=2 * SAVED_AT):
            steps_of(folder / "killed", flags=flags, num_ranks=2)
    except RunFailed:
        pass
    else:
        return "was not killed"
    start = newest_checkpoint(folder / "checkpoints")
    if start != SAVED_AT:
        return f"Megatron calls the checkpoint of iteration {start} complete"
    resumed = steps_of(folder / "resumed", flags=f"{flags} --load {folder / 'checkpoints'}", num_ranks=2)
    return compare(resumed, whole=whole_of(AHEAD, data=data), start=start, bit_for_bit=True).problem


def half_replaced(folder: Path, data: str, whole_of: WholeOf) -> str:
    """One rank's samples are those of iteration 3, the other's of iteration 6."""
    _train_to(AHEAD, data=data, folder=folder, num_steps=2 * SAVED_AT)
    here, other = (state_folder(str(folder / "checkpoints"), iteration) for iteration in (SAVED_AT, 2 * SAVED_AT))
    shutil.copy(other / "pool_rank00001.npz", here)
    return _refused(folder, data=data, because="of different saves")


def truncated(folder: Path, data: str, whole_of: WholeOf) -> str:
    """Half of a file is there."""
    _train_to(AHEAD, data=data, folder=folder)
    path = state_folder(str(folder / "checkpoints"), SAVED_AT) / "pool_rank00001.npz"
    os.truncate(path, path.stat().st_size // 2)
    return _refused(folder, data=data, because="is damaged")


def missing(folder: Path, data: str, whole_of: WholeOf) -> str:
    """The state of the checkpoint was not copied along, that of an earlier one was."""
    _train_to(AHEAD, data=data, folder=folder, num_steps=2 * SAVED_AT)
    shutil.rmtree(state_folder(str(folder / "checkpoints"), 2 * SAVED_AT))
    return _refused(folder, data=data, because="does not hold the samples that wait", start=2 * SAVED_AT)


def of_another_version(folder: Path, data: str, whole_of: WholeOf) -> str:
    """A file has another format."""
    _train_to(AHEAD, data=data, folder=folder)
    path = state_folder(str(folder / "checkpoints"), SAVED_AT) / "pool_rank00000.npz"
    with np.load(path, allow_pickle=False) as share:
        content = dict(share)
    np.savez(path, **{**content, "format": np.array(99)})
    return _refused(folder, data=data, because="written by another version")


def folder_used_again(folder: Path, data: str, whole_of: WholeOf) -> str:
    """A run from iteration 0 on two ranks saves where one on four ranks had saved."""
    _train_to(Case("look-ahead 3", ranks=4, ranks_after=4, overlap=True), data=data, folder=folder)
    shutil.rmtree(folder / "checkpoints" / f"iter_{SAVED_AT:07d}")
    _train_to(AHEAD, data=data, folder=folder)
    return _resumes(AHEAD, data=data, folder=folder, whole=whole_of(AHEAD, data=data))


def folder_used_again_in_order(folder: Path, data: str, whole_of: WholeOf) -> str:
    """A run without look-ahead saves where one with it had saved."""
    _train_to(AHEAD, data=data, folder=folder)
    shutil.rmtree(folder / "checkpoints" / f"iter_{SAVED_AT:07d}")
    _train_to(IN_ORDER, data=data, folder=folder)
    return _resumes(IN_ORDER, data=data, folder=folder, whole=whole_of(IN_ORDER, data=data))


def evaluation_between(folder: Path, data: str, whole_of: WholeOf) -> str:
    """Every second step is followed by evaluation."""
    flags = f"{AHEAD.flags} {data} --eval-interval 2 --eval-iters 1"
    steps = steps_of(folder / "run", flags=flags, num_ranks=2)
    return compare(steps, whole=whole_of(AHEAD, data=data), start=0, bit_for_bit=True).problem


def saved_in_background(folder: Path, data: str, whole_of: WholeOf) -> str:
    """--async-save: another process writes the checkpoint while steps go on."""
    flags = f"{_saving(AHEAD, data=data, folder=folder)} {IN_BACKGROUND}"
    run = run_ranks(folder / "run", flags=f"{flags} --exit-interval {2 * SAVED_AT + 1}", num_ranks=2)
    if "scheduled an async checkpoint save" not in run.recorded.output:
        return "no checkpoint was saved in the background"
    start = newest_checkpoint(folder / "checkpoints")
    resumed = steps_of(folder / "resumed", flags=f"{flags} --load {folder / 'checkpoints'}", num_ranks=2)
    return compare(resumed, whole=whole_of(AHEAD, data=data), start=start, bit_for_bit=True).problem


def counted_in_samples(folder: Path, data: str, whole_of: WholeOf) -> str:
    """--train-samples in place of --train-iters."""
    in_samples = f"--train-samples {NUM_STEPS * GLOBAL_BATCH_SIZE}"
    flags = _saving(AHEAD, data=data, folder=folder).replace(STEPS, in_samples)
    steps_of(folder / "run", flags=f"{flags} --exit-interval {SAVED_AT}", num_ranks=2)
    resumed = steps_of(folder / "resumed", flags=f"{flags} --load {folder / 'checkpoints'}", num_ranks=2)
    return compare(resumed, whole=whole_of(AHEAD, data=data), start=SAVED_AT, bit_for_bit=True).problem


def finetune(folder: Path, data: str, whole_of: WholeOf) -> str:
    """--finetune starts with iteration 0 and the first sample: nothing waits."""
    _train_to(AHEAD, data=data, folder=folder)
    flags = f"{AHEAD.flags} {data} --load {folder / 'checkpoints'} --finetune"
    return _same_samples(steps_of(folder / "tuned", flags=flags, num_ranks=2), whole_of(AHEAD, data=data))


def without_optimizer(folder: Path, data: str, whole_of: WholeOf) -> str:
    """--no-load-optim keeps the iteration, and so what waits."""
    _train_to(AHEAD, data=data, folder=folder)
    flags = f"{AHEAD.flags} {data} --load {folder / 'checkpoints'} --no-load-optim"
    return _same_samples(steps_of(folder / "again", flags=flags, num_ranks=2), whole_of(AHEAD, data=data)[SAVED_AT:])


def more_steps(folder: Path, data: str, whole_of: WholeOf) -> str:
    """A run that had come to the end of its data goes on with more."""
    flags = AHEAD.flags.replace(STEPS, f"--train-iters {NUM_STEPS // 2} --lr-decay-iters {NUM_STEPS}")
    flags += f" {data} --save {folder / 'checkpoints'} --save-interval {NUM_STEPS // 2}"
    steps_of(folder / "run", flags=flags, num_ranks=2)
    flags = f"{AHEAD.flags} {data} --lr-decay-iters {NUM_STEPS} --override-opt_param-scheduler"
    resumed = steps_of(folder / "resumed", flags=f"{flags} --load {folder / 'checkpoints'}", num_ranks=2)
    later = sorted(length for step in whole_of(IN_ORDER, data=data)[NUM_STEPS // 2 :] for length in step["lengths"])
    trained = sorted(length for step in resumed for length in step["lengths"])
    return "" if trained == later else f"{len(trained)} samples in {len(resumed)} steps, not the {len(later)} to come"


MISHAPS: dict[str, Mishap] = {
    "a rank is killed with half of its samples written": dies_while_writing,
    "samples of two saves in one folder: refused on every rank": half_replaced,
    "truncated samples: refused on every rank": truncated,
    "missing samples: refused on every rank": missing,
    "samples of another format: refused on every rank": of_another_version,
    "a run on DP2 saves where one on DP4 had saved": folder_used_again,
    "a run in order saves where one with look-ahead had saved": folder_used_again_in_order,
    "evaluation between steps with look-ahead": evaluation_between,
    "--async-save with look-ahead": saved_in_background,
    "--train-samples with look-ahead": counted_in_samples,
    "--finetune with look-ahead: nothing waits": finetune,
    "--no-load-optim with look-ahead: what waits is kept": without_optimizer,
    "torchrun --nnodes=1:2: one of two nodes is killed, the other resumes": node_lost,
    "more --train-iters after the data had ended, with look-ahead": more_steps,
}
"""By their names in the table."""


def _saving(case: Case, *, data: str, folder: Path) -> str:
    return f"{case.flags} {data} --save {folder / 'checkpoints'} --save-interval {SAVED_AT}"


def _train_to(case: Case, *, data: str, folder: Path, num_steps: int = SAVED_AT) -> None:
    """Save at every third step, and end at this one."""
    flags = f"{_saving(case, data=data, folder=folder)} --exit-interval {num_steps}"
    steps_of(folder / "run", flags=flags, num_ranks=case.ranks)


def _resumes(case: Case, *, data: str, folder: Path, whole: Steps) -> str:
    flags = f"{case.flags} {data} --load {folder / 'checkpoints'}"
    resumed = steps_of(folder / "resumed", flags=flags, num_ranks=case.ranks_after)
    return compare(resumed, whole=whole, start=SAVED_AT, bit_for_bit=True).problem


def _refused(folder: Path, *, data: str, because: str, start: int = SAVED_AT) -> str:
    """Nothing, where every rank ends with the reason and what to do."""
    flags = f"{AHEAD.flags} {data} --load {folder / 'checkpoints'} --ckpt-step {start}"
    try:
        run_ranks(folder / "refused", flags=flags, num_ranks=2, grace_seconds=60)
    except RunFailed:
        said = [(folder / "refused" / f"rank{rank}.log").read_text(errors="replace") for rank in range(2)]
        silent = [rank for rank, text in enumerate(said) if because not in text or "BalanceError" not in text]
        return f"ranks {silent} do not say that it {because}: {said[silent[0]][-500:]}" if silent else ""
    return "was not refused"


def _same_samples(steps: Steps, expected: Steps) -> str:
    ours, theirs = ([sorted(step["lengths"]) for step in of] for of in (steps, expected))
    return "" if ours == theirs else "other samples"


@contextmanager
def _killed_in(name: str, *, iteration: int) -> Iterator[None]:
    """Ranks forked meanwhile die when they have written half of this file of a checkpoint's state."""
    stock = Path.replace

    def replace(path: Path, target: Any) -> Path:
        if path.name == name and path.parent.name == f"iter_{iteration:07d}":
            os.truncate(path, path.stat().st_size // 2)
            os.kill(os.getpid(), signal.SIGKILL)
        return stock(path, target)

    Path.replace = replace  # type: ignore[method-assign]
    try:
        yield
    finally:
        Path.replace = stock  # type: ignore[method-assign]
