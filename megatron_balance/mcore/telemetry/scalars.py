"""Writes the figures as TensorBoard and W&B scalars under `balance/`, through Megatron's own writers.

Megatron makes its writers on the last rank of the world (training/global_vars.py), and only where flags ask for
them (`--tensorboard-dir`, `--wandb-project`).
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import torch.distributed as dist

from megatron_balance.mcore.telemetry.figures import Figures
from megatron_balance.runtime.collectives import broadcast_row


def send_to_writers(figures: Figures, *, group: dist.ProcessGroup) -> Figures:
    """Broadcast the figures from the first rank of the group; the last one, which is the world's last, writes them.

    A broadcast, although one message would do: gloo's messages keep the timeout that their group was made with,
    whatever `--distributed-timeout-seconds-after-init` says.

    Args:
        figures: on the first rank; elsewhere as many, of which none is read.
        group: gloo; all its ranks take part.

    Returns:
        The figures.
    """
    row = np.array(figures.row())
    return Figures.of_row(broadcast_row(row, group=group, what="the figures on the rank that writes them").tolist())


def write_scalars(figures: Figures, *, iteration: int, newest: int) -> None:
    """Write the known figures, where Megatron has writers. Call it from the training thread, which uses them too.

    Args:
        figures: means over the steps of a log interval.
        iteration: that ended the interval, as Megatron counts.
        newest: that Megatron has logged. W&B, whose steps never go back, keeps the figures there.
    """
    scalars = {f"balance/{name}": value for name, value in figures.known().items()}
    tensorboard, wandb = _writers()
    if tensorboard is not None:
        for name, value in scalars.items():
            tensorboard.add_scalar(name, value, iteration)
    if wandb is not None and wandb.run is not None:  # Megatron finishes the run before it exits early
        wandb.log(scalars, newest)


def flush_scalars() -> None:
    """Write to TensorBoard's file what was added since Megatron's own last flush: a signal may end a run after it."""
    tensorboard, _ = _writers()
    if tensorboard is not None:
        tensorboard.flush()


def _writers() -> tuple[Any, Any]:
    """TensorBoard's writer and the module of W&B, each None where flags do not ask for it."""
    if sys.modules.get("megatron.training") is None:  # a loop on megatron.core alone
        return None, None
    from megatron.training.global_vars import get_tensorboard_writer, get_wandb_writer

    return get_tensorboard_writer(), get_wandb_writer()
