"""Watches a run on one rank: logs its figures and device memory, and writes the record. `step/timing.py` times passes.

Nothing here sends a message: seconds and memory travel in the header by which ranks gather lengths two steps later. The
first rank of the world records plans, the first of every model replica (with `--balance-dynamic-cp` of every
context-parallel rank) its seconds.

Invariants: watching does not change training; a step that Megatron runs again counts once; a new run replaces the
record in the folder, a resumed one continues it.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import time
from argparse import Namespace
from collections import deque
from contextlib import AbstractContextManager
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from megatron_balance.mcore.setup.layout import Layout
from megatron_balance.mcore.setup.settings import Settings
from megatron_balance.mcore.step.figures import REPORTED_LATER, Alarms, Figures, log_line, mean_figures
from megatron_balance.mcore.step.packs import BalancedStep
from megatron_balance.mcore.step.timing import StepTimer
from megatron_balance.planner import DataSchedule, resolve_objective
from megatron_balance.record import RecordThread, RecordWriter, RunInfo, StepRecord
from megatron_balance.runtime.log import log_info, warn_once
from megatron_balance.runtime.process import close_on_undo, device_kind, environment

MAX_UNREAD_STEPS = 8
"""Steps whose marks the device has not passed yet; older ones are dropped."""

FIRST_STEPS = 4
"""Steps after which memory is read: the optimizer has its state, and micro-batches were full."""

LEFT_FREE = 0.1
"""Part of a device that the cap leaves to other libraries, fragments and longer samples."""

GIB = 2**30


class Watch:
    """The view of the run on a rank that loads data, or has Megatron's writers; `args` are those of Megatron's loop."""

    def __init__(self, settings: Settings, *, layout: Layout, loads_data: bool, args: Namespace | None) -> None:
        self._settings, self._place, self._args = settings, layout.this_rank, args
        self._prints = dist.get_rank() == 0
        self._times = loads_data and layout.this_rank.tp == 0
        self._on_gpu = device_kind() == "cuda"
        self._unread: deque[tuple[BalancedStep, int, StepTimer]] = deque(maxlen=MAX_UNREAD_STEPS)
        self._timer: StepTimer | None = None
        self._nanoseconds: dict[int, int] = {}  # by the number of the step
        self._objective = ""
        self._figures: list[Figures] = []
        self._unwritten: Figures = {}
        self._began: float | None = None
        self._alarms = Alarms()
        self._shapes: set[int] = set()  # at most one for each token of the cap
        self._memory = (0, 0, 0)
        self._newest_iteration = self._most_tokens = 0
        self._record: RecordThread | None = None
        if settings.record is not None and layout.leads_replica(each_cp_rank=settings.topology.dynamic_cp):
            folder = f"--balance-record {settings.record}"  # every rank that writes has a disk of its own to fill
            self._record = RecordThread(
                self._open, warn=lambda text: warn_once(f"writes no full record: {folder}: {text}", every_rank=True)
            )
        finish = self._finish  # one object, by which atexit knows it
        atexit.register(finish)
        close_on_undo(functools.partial(atexit.unregister, finish))
        close_on_undo(finish)

    def begin(self, step: BalancedStep, *, iteration: int) -> None:
        """A step is about to run."""
        self._read_finished()
        if self._times:
            self._timer = StepTimer(on_gpu=self._on_gpu)
            self._unread.append((step, iteration, self._timer))
        if iteration == self._newest_iteration:  # it runs again
            return
        self._say_figures()
        self._newest_iteration = iteration
        self._watch_memory(step)
        self._shapes.update(step.slots.num_tokens)
        self._unwritten = step.figures | {"exposed_seconds": step.exposed_seconds, "num_shapes": len(self._shapes)}
        if step.reported is not None and step.reported[:, 0].all():
            self._unwritten["peak_GiB"] = float(step.reported[:, 0].max()) / GIB
        if not self._prints or step.schedule is None:
            return
        if self._on_gpu:
            began, self._began = self._began, time.perf_counter()
            self._alarms.check(self._unwritten, step_seconds=None if began is None else self._began - began)
        if self._record is not None:
            schedule, figures = step.schedule, step.figures
            times = {name: figures[name] for name in ("plan_seconds", "exchange_seconds")}
            times["exposed_seconds"] = step.exposed_seconds
            self._record.add(lambda to: to.add_step(StepRecord.from_schedule(schedule, iteration=iteration, **times)))
        if self._settings.log_interval:
            self._objective = step.schedule.objective
            self._figures.append(self._unwritten)

    def timed(self, slot: int | None = None) -> AbstractContextManager[None]:
        """Times a forward pass of the micro-batch in this slot, or without one a backward pass."""
        return contextlib.nullcontext() if self._timer is None else self._timer.timed(slot)

    def end(self) -> None:
        """Ends the step: later passes (evaluation) are not timed."""
        self._timer = None
        self._read_finished()
        args, figures, self._unwritten = self._args, self._unwritten, {}
        if args is None or not figures or self._newest_iteration % args.tensorboard_log_interval:
            return
        from megatron.training.global_vars import get_tensorboard_writer, get_wandb_writer

        tensorboard, wandb = get_tensorboard_writer(), get_wandb_writer()
        for name, value in figures.items():
            if tensorboard:
                tensorboard.add_scalar(f"balance/{name}", value, self._newest_iteration)
            if wandb:
                wandb.log({f"balance/{name}": value}, self._newest_iteration)

    def _finish(self) -> None:
        """Training is over."""
        self._read_finished()
        self._say_figures()
        if self._record is not None:
            self._record.close()

    def _say_figures(self) -> None:
        """Say the figures of an interval, if the newest step was its last."""
        if not self._figures or self._newest_iteration % self._settings.log_interval:
            return
        figures = mean_figures(self._figures) | {"num_shapes": float(len(self._shapes))}
        self._figures.clear()
        log_info(f"iteration {self._newest_iteration} | {self._objective} | {log_line(figures)}")

    def _read_finished(self) -> None:
        """Read the marks of every step that the device has finished."""
        while self._unread and self._unread[0][-1] is not self._timer and self._unread[0][-1].finished:
            step, iteration, timer = self._unread.popleft()
            seconds = timer.seconds(step.num_microbatches)
            if seconds is None:
                continue
            self._nanoseconds[step.number] = max(int(seconds.sum() * 1e9), 1)
            if len(self._nanoseconds) > MAX_UNREAD_STEPS:
                del self._nanoseconds[min(self._nanoseconds)]
            if self._record is not None:
                known = len(seconds) == step.num_microbatches  # not under a virtual pipeline
                of_each = seconds if known else np.full(step.num_microbatches, np.nan)
                self._record.add(functools.partial(RecordWriter.add_seconds, iteration=iteration, seconds=of_each))

    def _open(self) -> RecordWriter:
        """Open this rank's part of the record."""
        settings, place, costs, info = self._settings, self._place, self._settings.costs, None
        if self._prints:
            rate = {} if costs.attention_rate is None else {"attention_rate": costs.attention_rate}
            info = RunInfo(
                topology=settings.topology,
                limits=settings.limits,
                cost_model=costs.model,
                cost_name=costs.name,
                objective=resolve_objective(settings.objective, topology=settings.topology),
                policy=settings.policy,
                environment=environment(device_kind()) | rate,
                row_tokens=settings.row_tokens,
                num_rows=settings.num_rows,
            )
        part = place.dp * settings.topology.cp_size + place.cp if settings.topology.dynamic_cp else place.dp
        return RecordWriter(Path(settings.record or ""), rank=part, info=info, resume=settings.resumes)

    def report(self, number: int) -> tuple[int, ...]:
        """What travels with the lengths of this step: memory, and the seconds of an earlier step, 0 if not known."""
        return (*self._memory, self._nanoseconds.get(number - REPORTED_LATER, 0))

    def _watch_memory(self, step: BalancedStep) -> None:
        """Read the allocator's counters once, resetting none; those of all ranks come with the next step."""
        if step.number == FIRST_STEPS:
            self._memory = self._read_memory()
        elif self._memory[0]:
            self._memory = (torch.cuda.max_memory_allocated(), *self._memory[1:])
        if self._prints and step.number == FIRST_STEPS + 1 and step.reported is not None and step.reported[:, 0].all():
            peak, reserved = (step.reported[:, :2].max(axis=0) / GIB).tolist()
            stage = " on pipeline stage 0 (the last one holds logits)" if self._settings.topology.pp_size > 1 else ""
            log_info(
                f"peak device memory{stage}: {peak:.1f} GiB allocated, {reserved:.1f} reserved. Micro-batches of "
                f"--max-tokens-per-gpu {step.reported[:, 2].min()} would leave a tenth of the device free, "
                "beside what other libraries hold now."
            )
        tokens = [n // size for n, size in zip(step.slots.num_tokens, step.slots.cp_sizes, strict=True)]
        self._most_tokens = max([self._most_tokens, *tokens])

    def _read_memory(self) -> tuple[int, int, int]:
        """Peaks allocated and reserved in bytes, and the cap; between steps, weights and optimizer are allocated."""
        peak, kept = torch.cuda.max_memory_allocated(), torch.cuda.memory_allocated()
        if not kept:  # a CPU, which has no properties to ask for
            return 0, 0, 0
        free, total = torch.cuda.mem_get_info()  # NCCL's buffers, contexts and workspaces are no allocations of torch
        others = max(total - free - torch.cuda.memory_reserved(), 0)
        room = max(total * (1 - LEFT_FREE) - others - kept, 0)
        cap = int(self._most_tokens * room / max(peak - kept, 1)) // 128 * 128
        return peak, torch.cuda.max_memory_reserved(), cap


def warn_of_oversized(schedule: DataSchedule) -> None:
    """Warn once where a sample is longer than the cap; figures count such samples."""
    if not schedule.oversized:
        return
    longest = int(schedule.padded_lengths.max())
    topology = schedule.topology.with_cp_size(schedule.topology.dynamic_cp_sizes[-1])
    cap = schedule.limits.max_tokens_per_microbatch(topology)
    warn_once(
        f"a sample of {longest} tokens is longer than a micro-batch may be ({cap}, --max-tokens-per-gpu times "
        f"{topology.cp_size} context-parallel ranks). Such samples run alone; raise the cap or shorten them if "
        "memory runs out.",
        topic="oversized",
    )
