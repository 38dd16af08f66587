"""State saved with each checkpoint: what the online calibration learned.

It is saved in `<checkpoints>/megatron_balance/iter_NNNNNNN/`, not in the checkpoint's own folder: Megatron refuses
to write into one that is not empty. It is written before Megatron says that the checkpoint is complete, so a
complete checkpoint has its whole state.

Invariants: a save leaves nothing there that it did not write; what one rank cannot
read is raised on every rank.
"""

from __future__ import annotations

import shutil
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from megatron_balance.errors import BalanceError
from megatron_balance.mcore.setup.groups import is_first_of_replica, meeting_of_world
from megatron_balance.mcore.step.prefetcher import StepPrefetcher
from megatron_balance.runtime.agreement import Meeting, agree, gather_texts
from megatron_balance.runtime.peers import named_ranks


def state_folder(checkpoints: str, iteration: int) -> Path:
    """The folder for one checkpoint."""
    return Path(checkpoints) / "megatron_balance" / f"iter_{iteration:07d}"


def save_state(prefetcher: StepPrefetcher, *, folder: Path) -> None:
    """Write this rank's share, on one rank of every model replica."""
    if is_first_of_replica():
        prefetcher.save(folder)


def forget_state(folder: Path) -> None:
    """Remove the state of an earlier run at a checkpoint that this run, a stock one, is about to write."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        shutil.rmtree(folder, ignore_errors=True)


def restore_state(prefetcher: StepPrefetcher, *, folder: Path, timeout: timedelta) -> None:
    """Read the state of the checkpoint that this run resumes from. Every rank calls it.

    Args:
        prefetcher: of this rank, before its first step.
        folder: of the checkpoint's state.
        timeout: after which missing ranks are named.

    Raises:
        BalanceError: on every rank. The state is damaged, or not all ranks find it.
    """
    problem = None
    try:
        if folder.is_dir():
            prefetcher.restore(folder)
    except BalanceError as error:
        problem = str(error)
    meeting = meeting_of_world(timeout=timeout)
    if meeting is not None:
        _check_all_find(folder, meeting=meeting)
        agree({}, meeting=meeting, topic="what belongs to the checkpoint", problem=problem)
    if problem is not None:
        raise BalanceError(problem)


def _check_all_find(folder: Path, *, meeting: Meeting) -> None:
    here = folder.is_dir()
    found = gather_texts(str(here), meeting=meeting, topic="where the checkpoints are")
    if len(set(found)) > 1:
        without = [rank for rank, one in enumerate(found) if one != str(True)]
        raise BalanceError(
            f"{named_ranks(without)} of {len(found)} cannot find {folder}, and the others can: --load must name a "
            "folder that all nodes share, and the folder megatron_balance in it belongs to the checkpoints."
        )
