"""What goes with a checkpoint: samples that wait under `--balance-lookahead`, and what online calibration learned.

It lies in `<checkpoints>/megatron_balance/iter_NNNNNNN/`, not in the checkpoint's own folder: Megatron refuses
to write into one that is not empty.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron_balance.errors import BalanceError
from megatron_balance.mcore.balancer import StepBalancer
from megatron_balance.mcore.groups import is_first_of_replica
from megatron_balance.mcore.sample_pool import SamplePool


def state_folder(checkpoints: str, iteration: int) -> Path:
    """The folder for one checkpoint."""
    return Path(checkpoints) / "megatron_balance" / f"iter_{iteration:07d}"


def save_state(balancer: StepBalancer, *, args: Any, iteration: int) -> None:
    """Write this rank's share, on one rank of every model replica.

    Args:
        balancer: of this rank.
        args: Megatron's arguments.
        iteration: of the checkpoint.
    """
    if args.save and is_first_of_replica():
        balancer.save(state_folder(args.save, iteration))


def restore_state(balancer: StepBalancer, *, args: Any, lookahead: int) -> None:
    """Read the state of the checkpoint that this run resumes from, if it has one.

    Args:
        balancer: of this rank, before its first step.
        args: Megatron's arguments.
        lookahead: `--balance-lookahead` of this run.

    Raises:
        BalanceError: samples wait there, and this run has no look-ahead: they would be lost.
    """
    if not args.load or not args.iteration:
        return
    folder = state_folder(args.load, args.iteration)
    if not folder.is_dir():
        return
    if lookahead == 1 and SamplePool.is_in(folder):
        raise BalanceError(
            f"{folder} holds samples that wait for their step, and --balance-lookahead is 1: they would be skipped. "
            "Resume with the --balance-lookahead of the run that saved it."
        )
    balancer.restore(folder)
