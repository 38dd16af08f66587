"""Trains with pretrain_sft and records every step, rank by rank: for the quickstart, tests and benchmarks.

    torchrun … tests/kit/cpu_shim.py tests/kit/record_steps.py RECORD_DIR ARGS

Each rank writes RECORD_DIR/rankN.jsonl, a line a step: seconds, those of the training thread in forward and backward
passes too, loss and gradient norm in full precision, and the plan of a balanced step. TRAINING_SCRIPT=FILE in the
environment names a script that trains in place of pretrain_sft.
"""

import contextlib
import functools
import inspect
import json
import os
import runpy
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pretrain_sft
import torch
from megatron.core.pipeline_parallel import schedules
from megatron.training import training

from megatron_balance.mcore.run import current
from megatron_balance.runtime.process import device_kind

Function = Callable[..., Any]
SCHEDULE = "forward_backward_func"
"""The parameter of train_step that has Megatron's schedule, in a balanced run wrapped by the hook."""


def main():
    """Record while the script trains."""
    train_wrapped(recorded)


def train_wrapped(wrap):
    """Train with `wrap(train_step, out=…)` for Megatron's; the first argument names the folder of the file."""
    directory = Path(sys.argv.pop(1))
    directory.mkdir(parents=True, exist_ok=True)
    script = os.environ.get("TRAINING_SCRIPT")
    with contextlib.ExitStack() as stack:
        out = stack.enter_context((directory / f"rank{os.environ['RANK']}.jsonl").open("w"))
        stack.enter_context(mock.patch.object(training, "train_step", wrap(training.train_step, out=out)))
        if script is None:
            pretrain_sft.main()
        else:
            sys.path.insert(0, str(Path(script).resolve().parent))  # as Python does for a script
            runpy.run_path(script, run_name="__main__")


def recorded(train_step, *, out, **columns):
    """`train_step` that writes a line to `out` after each call, `columns` at its end."""

    signature = inspect.signature(train_step)

    @functools.wraps(train_step)
    def wrapper(*positional, **keywords):
        bound, passes = signature.bind(*positional, **keywords), list[float]()
        each_pass = []
        schedule = bound.arguments[SCHEDULE]

        @functools.wraps(schedule)
        def timed(*given, **named):
            began = time.thread_time()
            with contextlib.ExitStack() as stack:
                for name in ("forward_step", "backward_step"):
                    clocked = _clocked(getattr(schedules, name), seconds=each_pass)
                    stack.enter_context(mock.patch.object(schedules, name, clocked))
                outputs = schedule(*given, **named)
            passes.append(time.thread_time() - began)
            return outputs

        bound.arguments[SCHEDULE] = timed
        wall, cpu = time.perf_counter(), time.process_time()
        result = train_step(*bound.args, **bound.kwargs)
        row = {"seconds": time.perf_counter() - wall, "cpu_seconds": time.process_time() - cpu}
        row |= {"passes_cpu_seconds": sum(passes), "each_pass_cpu_seconds": each_pass}
        if device_kind() == "cuda":
            row["peak_bytes"] = torch.cuda.max_memory_allocated()
        losses, grad_norm = result[0], result[5]
        row |= {name.replace(" ", "_"): float(value) for name, value in losses.items()}
        row |= {"grad_norm": None if grad_norm is None else float(grad_norm), **_plan(), **columns}
        print(json.dumps(row), file=out, flush=True)
        return result

    return wrapper


def _clocked(function, *, seconds):
    """The function, which appends the training thread's seconds of each call."""

    @functools.wraps(function)
    def wrapper(*positional, **keywords):
        began = time.thread_time()
        result = function(*positional, **keywords)
        seconds.append(time.thread_time() - began)
        return result

    return wrapper


def _plan():
    balanced = current()
    step = balanced.last_step if balanced is not None else None
    if step is None:
        from megatron.core.num_microbatches_calculator import get_num_microbatches

        return {"num_microbatches": get_num_microbatches()}
    plan = {"num_microbatches": step.num_microbatches, "exposed_seconds": step.exposed_seconds}
    plan |= {"microbatch_tokens": step.sizes.num_tokens, "cp_sizes": step.sizes.cp_sizes}
    if step.schedule is not None:
        plan["lengths"] = step.schedule.lengths.tolist()
        plan["ranks"] = [[list(slot) for slot in slots] for slots in step.schedule.ranks]
    return plan


if __name__ == "__main__":
    main()
