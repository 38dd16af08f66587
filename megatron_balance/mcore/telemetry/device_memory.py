"""Says once, after the first steps, what device memory training took and what token cap it would allow.

Each rank reads the counters of torch's allocator and resets none. The figures travel in the header of a gather of
lengths, so that rank 0 knows those of its data-parallel ranks; other pipeline stages are not among them.
"""

from __future__ import annotations

import torch

from megatron_balance.mcore.setup.run_log import RunLog
from megatron_balance.mcore.step.balanced_step import BalancedStep
from megatron_balance.mcore.step.planner import StepPlanner
from megatron_balance.mcore.telemetry.observer import Watcher

FIRST_STEPS = 4
"""Steps after which memory is read: the optimizer has its state, and micro-batches were full."""

LEFT_FREE = 0.1
"""Part of a device that the cap leaves to other libraries, fragments and longer samples."""

GIB = 2**30


class DeviceMemory(Watcher):
    """Memory of this rank's device, and on rank 0 of all; on a CPU nothing is said.

    Args:
        planner: sends the figures.
        log: prints on rank 0.
    """

    def __init__(self, planner: StepPlanner, *, log: RunLog) -> None:
        self._planner, self._log = planner, log
        self._num_steps = self._tokens = 0
        self._said = False

    def begin(self, step: BalancedStep, *, iteration: int) -> None:
        """Read the counters once, and say those of all ranks once they have arrived."""
        if self._num_steps == FIRST_STEPS:
            self._planner.reported = self._read()
        if not self._said and step.reported is not None and step.reported[:, 0].all():
            self._said = True
            peak, reserved = (step.reported[:, :2].max(axis=0) / GIB).tolist()
            stage = " on pipeline stage 0" if self._planner.topology.pp_size > 1 else ""
            self._log.say(
                f"peak device memory{stage}: {peak:.1f} GiB allocated, {reserved:.1f} reserved. Micro-batches of "
                f"--max-tokens-per-gpu {step.reported[:, 2].min()} would leave a tenth of the device free."
            )
        self._num_steps += 1
        sizes = step.cp_sizes or [self._planner.topology.cp_size] * step.num_microbatches
        self._tokens = max([self._tokens, *(n // size for n, size in zip(step.microbatch_tokens, sizes, strict=True))])

    def _read(self) -> tuple[int, int, int]:
        """Peaks allocated and reserved in bytes, and the cap; between steps, weights and optimizer are allocated."""
        peak, kept = torch.cuda.max_memory_allocated(), torch.cuda.memory_allocated()
        if not kept:  # a CPU, which has no properties to ask for
            return 0, 0, 0
        total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
        room = max(total * (1 - LEFT_FREE) - kept, 0)
        return peak, torch.cuda.max_memory_reserved(), int(self._tokens * room / max(peak - kept, 1)) // 128 * 128
