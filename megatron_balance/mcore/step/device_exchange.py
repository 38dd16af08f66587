"""Moves the samples of a step between GPUs, over a communicator of its own (`--balance-exchange nccl`).

NCCL kernels wait on the GPU for those of other ranks. Kernels of two communicators deadlock where ranks launch them in
different orders and a GPU cannot run both at once (NCCL's user guide, "Using multiple NCCL communicators
concurrently"). A thread beside training would launch its kernels in another order on every rank. So the exchange is
launched by the training thread when a step begins, and no other kernel is on the GPU meanwhile.

Invariants: every rank has launched all collectives of the step before, and none of this step; the GPU has ended them
when the exchange is launched, and has ended the exchange when `run` returns; one thread uses the communicator. So the
exchange of step k waits for collectives of step k-1 alone, and those for no exchange after k-1: there is no circle.
"""

from __future__ import annotations

import threading

import torch
import torch.distributed as dist

from megatron_balance.errors import BalanceError
from megatron_balance.runtime.prepared_exchange import PreparedExchange
from megatron_balance.samples.sample import Sample


class DeviceExchange:
    """The exchanges of one rank. Make it on the training thread.

    Args:
        group: ranks that load different samples; NCCL, used for nothing else.
        device: of this rank.
    """

    def __init__(self, group: dist.ProcessGroup, *, device: torch.device) -> None:
        self.device = device
        self._group = group
        self._thread = threading.get_ident()

    def run(self, prepared: PreparedExchange) -> dict[int, Sample]:
        """Exchange at the beginning of a step, as `PreparedExchange.run`; the samples are on the GPU.

        Raises:
            BalanceError: another thread than the one that made this object calls it.
        """
        if threading.get_ident() != self._thread:
            raise BalanceError(
                f"--balance-exchange nccl: thread {threading.current_thread().name} exchanges samples beside training, "
                "where kernels of two communicators can deadlock. Run the steps on the thread that began the training, "
                "or set --balance-exchange gloo."
            )
        torch.cuda.synchronize(self.device)
        arrived = prepared.run(group=self._group)
        torch.cuda.synchronize(self.device)
        return arrived
