"""Reports a run: figures in the log and Megatron's writers, alarms, device memory, and the record.

Nothing here sends a message: seconds and memory travel in the header by which ranks gather lengths two steps later. The
first rank of the world logs and records plans, the first of every model replica (with `--balance-dynamic-cp` of every
context-parallel rank) records its seconds, and the last rank has Megatron's writers.

Invariants: telemetry does not change training; a step that Megatron runs again counts once; a new run replaces the
record in the folder, a resumed one continues it; a figure that is not known is absent.
"""

from __future__ import annotations

import atexit
import contextlib
import shlex
import sys
import time
from argparse import Namespace
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from megatron_balance.mcore.prepare import BalancedStep
from megatron_balance.mcore.setup.layout import Layout
from megatron_balance.mcore.setup.settings import Settings
from megatron_balance.planner import DataSchedule, resolve_objective, slowest_over_mean, unavoidable_waiting, waiting
from megatron_balance.record import RecordWriter, RunInfo, StepRecord, line_of, seconds_line
from megatron_balance.record.step import rank_slowdowns
from megatron_balance.runtime.log import log_info, warn_once
from megatron_balance.runtime.process import close_on_undo, device_kind, environment

Figures = dict[str, float]

REPORT_DELAY = 2
"""Steps after which seconds are reported: the next step is gathered while the one after that runs."""

FIRST_STEPS = 4
"""Steps after which memory is read: the optimizer has its state, and micro-batches were full."""

FREE_FRACTION = 0.1
"""Part of a device that the cap leaves to other libraries, fragments and longer samples."""

GIB = 2**30

ALARM_STEPS = 20
MAX_EXPOSED, MAX_UNEVEN = 0.01, 0.1
"""Waiting for data over the time between two steps, and measured imbalance above the planned one, before an alarm."""

SPEED_STEPS, MAX_SLOWDOWN = 50, 1.05
"""Steps after which the rank that is slowest for its work is looked for, and the slowdown above which it is named."""

EXPOSED = (
    "steps wait for their data {:.1%} of their time: look whether the loader keeps up (--num-workers), and whether "
    "ranks have CPU cores to spare."
)
UNEVEN = (
    "ranks are less even than planned: max/mean of their time is {:.0%} above the plan's. Fit the costs to a record of "
    "this run (megatron-balance fit), or look for a slow device."
)


class Telemetry:
    """The view of the run on a rank; `args` are those of Megatron's loop."""

    def __init__(self, settings: Settings, *, layout: Layout, loads_data: bool, args: Namespace | None) -> None:
        self._settings, self._args = settings, args
        self._logs = dist.get_rank() == 0
        self._measures = loads_data and layout.this_rank.tp == 0
        self._on_gpu = device_kind() == "cuda"
        self._timer: StepTimer | None = None  # of the step that runs
        self._ended: StepTimer | None = None  # of the step before, until the device has passed its marks
        self._nanoseconds: dict[int, int] = {}  # by the number of the step
        self._began = time.perf_counter()
        self._alarms = Alarms()
        self._memory = (0, 0)
        self._newest_iteration = self._max_tokens = 0
        self._record: RecordWriter | None = None
        coords, topology = layout.this_rank, settings.topology
        self._rank_of_record = coords.dp * topology.cp_size + coords.cp if topology.dynamic_cp else coords.dp
        if settings.record is not None and layout.leads_replica(each_cp_rank=topology.dynamic_cp):
            folder = f"--balance-record {settings.record}"  # every rank that writes has a disk of its own to fill
            self._record = RecordWriter(
                Path(settings.record),
                rank=self._rank_of_record,
                writes_plans=self._logs,
                resume=settings.resumes,
                warn=lambda text: warn_once(f"writes no full record: {folder}: {text}", every_rank=True),
            )
            self.use(settings)
        atexit.register(self._close)
        close_on_undo(lambda: atexit.unregister(self._close))
        close_on_undo(self._close)

    def begin(self, step: BalancedStep, *, iteration: int) -> None:
        """A step is about to run."""
        self._read_timer()
        if self._measures:
            self._timer = StepTimer(step, iteration=iteration, on_gpu=self._on_gpu)
        if iteration == self._newest_iteration:  # it runs again
            return
        self._newest_iteration = iteration
        self._read_memory(step)
        figures = figures_of(step)
        self._write(figures, iteration=iteration)
        if self._logs:
            self._log_step(step, figures=figures, iteration=iteration)

    def _log_step(self, step: BalancedStep, *, figures: Figures, iteration: int) -> None:
        schedule, reported = step.schedule, step.reported
        assert schedule is not None, "the first rank plans"
        assert reported is not None, "and gathers"
        began, self._began = self._began, time.perf_counter()
        step_seconds = self._began - began if self._on_gpu else None
        self._alarms.check(schedule, figures, seconds=reported[:, -1] / 1e9, step_seconds=step_seconds)
        if self._record is not None:
            times = {name: getattr(step, name) for name in ("plan_seconds", "exchange_seconds", "exposed_seconds")}
            self._record.add(line_of(StepRecord.from_schedule(schedule, iteration=iteration, **times)))
        if self._settings.log_interval and iteration % self._settings.log_interval == 0:
            log_info(f"iteration {iteration} | {schedule.objective} | {log_line(figures)}")

    def timed(self, number: int | None = None) -> AbstractContextManager[None]:
        """Measures a forward pass of the micro-batch of this number, or without one a backward pass."""
        return contextlib.nullcontext() if self._timer is None else self._timer.timed(number)

    def use(self, settings: Settings) -> None:
        """Later steps are planned by these settings."""
        self._settings = settings
        if self._logs and self._record is not None:
            self._record.add(run_info(settings, args=self._args).line())

    def end(self, *, waits: bool = False) -> NDArray[np.float64] | None:
        """Ends the step: later passes (evaluation) are not measured.

        Where the caller `waits` for the device, the seconds of its micro-batches, if they were measured.
        """
        if waits and self._on_gpu:
            torch.cuda.synchronize()
        self._ended, self._timer = self._timer, None
        seconds = self._ended.seconds() if self._ended and waits else None
        self._read_timer()
        return seconds

    def _write(self, figures: Figures, *, iteration: int) -> None:
        """To Megatron's writers, which are on its last rank."""
        if self._args is None or iteration % self._args.tensorboard_log_interval:
            return
        from megatron.training.global_vars import get_tensorboard_writer, get_wandb_writer

        tensorboard, wandb = get_tensorboard_writer(), get_wandb_writer()
        named = {f"balance/{name}": value for name, value in figures.items()}
        for name, value in named.items():
            if tensorboard:
                tensorboard.add_scalar(name, value, iteration)
        if wandb:
            wandb.log(named, iteration)

    def report(self, number: int) -> tuple[int, ...]:
        """What travels with the lengths of this step: memory, and the seconds of an earlier step, 0 if not known."""
        return (*self._memory, self._nanoseconds.get(number - REPORT_DELAY, 0))

    def _close(self) -> None:
        """Training is over."""
        self._read_timer()
        if self._record is not None:
            self._record.close()

    def _read_timer(self) -> None:
        """Read the marks of the step before, if the device has passed them."""
        timer = self._ended
        if timer is None or not timer.is_finished or (seconds := timer.seconds()) is None:
            return
        self._ended = None
        self._nanoseconds[timer.number] = max(int(seconds.sum() * 1e9), 1)
        self._nanoseconds.pop(timer.number - 2 * REPORT_DELAY, None)
        if self._record is not None:
            if len(seconds) != timer.num_microbatches:  # under a virtual pipeline
                seconds = np.full(timer.num_microbatches, np.nan)
            self._record.add(seconds_line(timer.iteration, rank=self._rank_of_record, seconds=seconds))

    def _read_memory(self, step: BalancedStep) -> None:
        """Read the allocator's counters, resetting none; those of all ranks come with the next step."""
        if step.number >= FIRST_STEPS:
            cap = self._memory[1] or self.allowed_tokens() // 128 * 128
            self._memory = torch.cuda.max_memory_allocated(), cap
        memory = None if step.reported is None else step.reported[:, 2:4]
        if self._logs and step.number == FIRST_STEPS + 1 and memory is not None and memory[:, 0].all():
            peak, cap = float(memory[:, 0].max()) / GIB, max(int(memory[:, 1].min()), 1)
            if self._record is not None:
                self._record.add({"kind": "memory", "measured_cap": cap})
            log_info(
                f"peak device memory: {peak:.1f} GiB allocated on stage 0. Micro-batches of --max-tokens-per-gpu {cap} "
                "would leave 10 % of device memory free, beside what other libraries hold now."
            )
        columns = zip(step.sizes.num_tokens, step.sizes.cp_sizes, strict=True)
        self._max_tokens = max([self._max_tokens, *(tokens // size for tokens, size in columns)])

    def allowed_tokens(self) -> int:
        """The cap that would leave FREE_FRACTION of this device, by its largest micro-batch so far; 0 on a CPU.

        By the most that torch has reserved, and by what the device says that all else takes: NCCL, contexts,
        workspaces.
        """
        static = torch.cuda.memory_allocated()  # between steps: weights and optimizer
        if not static:
            return 0
        free, total = torch.cuda.mem_get_info()
        others = max(total - free - torch.cuda.memory_reserved(), 0)
        available = max(total * (1 - FREE_FRACTION) - others - static, 0)
        return int(self._max_tokens * available / max(torch.cuda.max_memory_reserved() - static, 1))


def run_info(settings: Settings, *, args: Namespace | None) -> RunInfo:
    """What a record says of a run; `args` are those of Megatron's loop."""
    costs, granularity = settings.costs, getattr(args, "recompute_granularity", None)
    rate = {} if costs.attention_rate is None else {"attention_rate": costs.attention_rate}
    recompute = {} if granularity is None else {"recompute": granularity}
    inputs = {"date": date.today().isoformat(), "command": shlex.join(sys.argv)}
    if args is not None:
        inputs["model"] = f"of {args.num_layers} layers, hidden size {args.hidden_size}"
        inputs["data"] = " ".join(getattr(args, "data_path", None) or ())
    return RunInfo(
        topology=settings.topology,
        limits=settings.limits,
        cost_model=costs.model,
        cost_name=costs.name,
        objective=resolve_objective("auto", topology=settings.topology),
        policy=settings.policy,
        environment=environment(device_kind()) | rate | recompute | inputs,
        row_tokens=settings.row_tokens,
        num_rows=settings.num_rows,
    )


def figures_of(step: BalancedStep) -> Figures:
    """The figures of a step, by the plan where this rank has it.

    Seconds of plan, exchange and waiting are those of this rank, measured ones those of the data-parallel ranks of one
    pipeline stage and context-parallel rank, some steps before.
    """
    schedule, reported = step.schedule, step.reported
    if schedule is None or reported is None:
        return {**step.figures, "exposed_seconds": step.exposed_seconds}
    grid, seconds = schedule.cost_grid, reported[:, -1] / 1e9
    figures: Figures = {
        "planned_imbalance": slowest_over_mean(grid, objective=schedule.objective, topology=schedule.topology),
        "over_bound": schedule.predicted_cost / schedule.lower_bound if schedule.lower_bound else 1.0,
        "unavoidable_waiting": unavoidable_waiting(grid, lower_bound=schedule.lower_bound),
        "oversized_samples": len(schedule.oversized),
        "num_microbatches": schedule.num_microbatches,
        "padding_fraction": 1 - step.totals.computed / max(step.num_tokens, 1),
        "fallback_plans": float(reported[:, 1].sum()),
        "plan_seconds": step.plan_seconds,
        "exchange_seconds": step.exchange_seconds,
        "exposed_seconds": step.exposed_seconds,
    }
    if (seconds > 0).all():
        figures["measured_imbalance"] = float(seconds.max() / seconds.mean())
        figures["busiest_rank_seconds"] = float(seconds.max())
    if reported[:, 2].all():
        figures["peak_GiB"] = float(reported[:, 2].max()) / GIB
    if schedule.forest is not None:
        figures["computed_fraction"] = step.totals.computed / max(step.totals.tokens, 1)
    return figures


def log_line(figures: Figures) -> str:
    """The figures as a line of the log."""
    measured = "unknown"
    if "measured_imbalance" in figures:
        busiest = figures["busiest_rank_seconds"] * 1e3
        measured = f"{figures['measured_imbalance']:.4f} (busiest rank {busiest:.1f} ms)"
    parts = [
        f"max/mean of rank time: planned {figures['planned_imbalance']:.4f}, measured {measured}",
        f"{figures['over_bound']:.4f} of the bound, where {figures['unavoidable_waiting']:.1%} of the time is waiting",
        f"micro-batches {figures['num_microbatches']:.4g}",
    ]
    if "computed_fraction" in figures:
        parts.append(f"computed {figures['computed_fraction']:.1%} of the tokens given")
    parts.append(f"padding {figures['padding_fraction']:.1%}")
    if figures["oversized_samples"]:
        parts.append(f"samples over the cap {figures['oversized_samples']:.4g}")
    parts += [f"{name} {figures[f'{name}_seconds'] * 1e3:.1f} ms" for name in ("plan", "exchange", "exposed")]
    return " | ".join(parts)


class Alarms:
    """Warns once of each excess that lasts ALARM_STEPS steps in a row, and of ranks that are slow for their work."""

    def __init__(self) -> None:
        self._num_steps = {EXPOSED: 0, UNEVEN: 0}
        self._costs: deque[NDArray[np.float64]] = deque(maxlen=REPORT_DELAY + 1)  # of ranks in the newest steps
        self._measured: list[tuple[NDArray[np.float64], NDArray[np.float64]]] = []

    def check(
        self, schedule: DataSchedule, figures: Figures, *, seconds: NDArray[np.float64], step_seconds: float | None
    ) -> None:
        """Of a step, `[dp_size]` seconds of ranks in an earlier one, 0 where not known, and those since the last step.

        Without the last, which count on GPUs, no excess is looked for.
        """
        if step_seconds is not None:
            uneven = figures.get("measured_imbalance", 1.0) / figures["planned_imbalance"] - 1
            self._count(EXPOSED, figures["exposed_seconds"] / step_seconds, limit=MAX_EXPOSED)
            self._count(UNEVEN, uneven, limit=MAX_UNEVEN)
        self._costs.append(schedule.cost_grid.sum(axis=1, dtype=float))
        # Where ranks wait in micro-batches their seconds hold those of others.
        waits_at_end = waiting(schedule.objective, topology=schedule.topology).sync_size == 1
        if waits_at_end and not schedule.topology.dynamic_cp and (seconds > 0).all():
            self._measured.append((self._costs[0], seconds))
            if len(self._measured) == SPEED_STEPS:
                self._name_slowest_rank()

    def _count(self, text: str, value: float, *, limit: float) -> None:
        self._num_steps[text] = self._num_steps[text] + 1 if value > limit else 0
        if self._num_steps[text] == ALARM_STEPS:
            warn_once(text.format(value), topic=text)

    def _name_slowest_rank(self) -> None:
        costs, measured = map(np.array, zip(*self._measured, strict=True))
        self._measured.clear()
        slowdowns = rank_slowdowns(costs, seconds=measured)
        rank = int(slowdowns.argmax())
        if slowdowns[rank] > MAX_SLOWDOWN:
            warn_once(
                f"data-parallel rank {rank} takes {slowdowns[rank]:.2f} times as long as the median rank for the same "
                f"work, in {SPEED_STEPS} steps: look whether its device is throttled or shared, and take its node out.",
                topic=f"slow rank {rank}",
            )


class StepTimer:
    """The seconds of the passes of a step on one rank, between marks in its stream of work; the device never waits.

    They include what a pass waits for (all-to-all, parameters of FSDP, tensor- and context-parallel peers), so that
    ranks which meet in a micro-batch look more even than they are, and exclude pipeline neighbours, gradient reduction
    and optimizer. On a GPU marks are events in the stream that computes; else the thread's own CPU time, which other
    jobs of the machine do not lengthen.
    """

    def __init__(self, step: BalancedStep, *, iteration: int, on_gpu: bool) -> None:
        self.number, self.iteration, self.num_microbatches = step.number, iteration, step.num_microbatches
        self._on_gpu = on_gpu
        self._forward: list[tuple[Any, Any]] = []
        self._backward: list[tuple[Any, Any]] = []

    @contextlib.contextmanager
    def timed(self, number: int | None) -> Iterator[None]:
        """Measures a forward pass of the micro-batch of this number, or without one a backward pass, in one order."""
        start = self._mark()
        yield
        (self._backward if number is None else self._forward).append((start, self._mark()))

    @property
    def is_finished(self) -> bool:
        """True if the device has passed the last mark; does not wait."""
        return not self._on_gpu or not self._backward or self._backward[-1][1].query()

    def seconds(self) -> NDArray[np.float64] | None:
        """Forward and backward together, `[num_microbatches]`, once `is_finished`; None where a pass was not measured.

        `[1]`, their sum, where a rank holds several model chunks, whose backward passes come in another order.
        """
        if not self._forward or len(self._forward) != len(self._backward):
            return None
        pairs = zip(self._forward, self._backward, strict=True)
        sums = np.array([sum(self._between(*marks) for marks in pair) for pair in pairs])
        return sums if len(sums) == self.num_microbatches else sums.sum(keepdims=True)

    def _between(self, start: Any, end: Any) -> float:
        return start.elapsed_time(end) / 1e3 if self._on_gpu else end - start

    def _mark(self) -> Any:
        if not self._on_gpu:
            return time.thread_time()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
