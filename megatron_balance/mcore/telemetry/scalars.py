"""Writes the figures as TensorBoard and W&B scalars under `balance/`, through Megatron's own writers.

Megatron makes its writers on the last rank of the world (training/global_vars.py), and only where flags ask for
them (`--tensorboard-dir`, `--wandb-project`).
"""

from __future__ import annotations

import sys

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


def write_scalars(figures: Figures, *, iteration: int) -> None:
    """Write the known figures, where Megatron has writers.

    Args:
        figures: means over the steps since the last time.
        iteration: as Megatron counts.
    """
    if sys.modules.get("megatron.training") is None:  # a loop on megatron.core alone
        return
    from megatron.training.global_vars import get_tensorboard_writer, get_wandb_writer

    scalars = {f"balance/{name}": value for name, value in figures.known().items()}
    tensorboard, wandb = get_tensorboard_writer(), get_wandb_writer()
    if tensorboard is not None:
        for name, value in scalars.items():
            tensorboard.add_scalar(name, value, iteration)
    if wandb is not None:
        wandb.log(scalars, iteration)
