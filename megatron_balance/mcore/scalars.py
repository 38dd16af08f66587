"""The figures as TensorBoard and W&B scalars, through Megatron's own writers, under `balance/`.

Megatron makes its writers on the last rank of the world (training/global_vars.py), and only where it was asked for
them (`--tensorboard-dir`, `--wandb-project`).
"""

from __future__ import annotations

from dataclasses import astuple

import torch
import torch.distributed as dist

from megatron_balance.mcore.figures import Figures
from megatron_balance.runtime.peers import waiting_for


def send_to_writers(figures: Figures | None, *, group: dist.ProcessGroup) -> Figures:
    """Bring the figures from the first rank of the group to its last, which is the world's.

    Args:
        figures: on the first rank; None elsewhere.
        group: gloo; its first and last rank take part, the others may call this too.

    Returns:
        The figures on the first and the last rank.
    """
    first, last = 0, group.size() - 1
    message = torch.tensor(astuple(figures or Figures()), dtype=torch.float64)
    with waiting_for("the figures on the rank that writes them", group=group):
        if first != last and group.rank() == first:
            dist.send(message, dist.get_global_rank(group, last), group=group)
        if first != last and group.rank() == last:
            dist.recv(message, dist.get_global_rank(group, first), group=group)
    return Figures(*message.tolist())


def write_scalars(figures: Figures, *, iteration: int) -> None:
    """Write what is known, where Megatron has writers.

    Args:
        figures: means over the steps since the last time.
        iteration: as Megatron counts.
    """
    from megatron.training.global_vars import get_tensorboard_writer, get_wandb_writer

    scalars = {f"balance/{name}": value for name, value in figures.known().items()}
    tensorboard, wandb = get_tensorboard_writer(), get_wandb_writer()
    if tensorboard is not None:
        for name, value in scalars.items():
            tensorboard.add_scalar(name, value, iteration)
    if wandb is not None:
        wandb.log(scalars, iteration)
