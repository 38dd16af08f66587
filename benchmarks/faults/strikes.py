"""Faults of a rank, by name. Each is set up before training and strikes at a step, in the real code's way.

A strike replaces one function of the package, of its data set or of this process's environment.
"""

from __future__ import annotations

import itertools
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import sft_dataset
import torch
import torch.distributed as dist

import megatron_balance
from megatron_balance.mcore.step import items, packs, plan_process
from megatron_balance.mcore.step import planner as step_planner
from megatron_balance.mcore.step.prefetcher import StepPrefetcher
from megatron_balance.runtime.exchange import PreparedExchange


@dataclass(frozen=True)
class Strike:
    """Time and place of a fault."""

    step: int
    global_batch_size: int
    rank: int
    folder: Path

    @property
    def sample(self) -> int:
        """The last sample of the step, which the last data-parallel rank loads."""
        return self.step * self.global_batch_size - 1

    def note(self) -> None:
        """It happens now."""
        (self.folder / f"strike{self.rank}").write_text(str(time.monotonic()))

    def send(self, number: signal.Signals) -> None:
        """A signal to this process."""
        self.note()
        os.kill(os.getpid(), number)


def _at_call(
    owner: Any, name: str, *, call: int, before: Callable[[], None] = bool, after: Callable[[], None] = bool
) -> None:
    """Have something done around the n-th call of a function."""
    original = getattr(owner, name)
    calls = 0

    def wrapper(*positional: Any, **keywords: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == call:
            before()
        result = original(*positional, **keywords)
        if calls == call:
            after()
        return result

    setattr(owner, name, wrapper)


def _of_rows(change: Callable[[dict[str, Any]], None], *, of_sample: int | None = None) -> None:
    """Change one row of the data set, or all."""
    original = sft_dataset.SftDataset.__getitem__

    def changed(self: Any, index: int) -> dict[str, Any]:
        row = original(self, index)
        if of_sample in (None, index):
            change(row)
        return row

    sft_dataset.SftDataset.__getitem__ = changed  # type: ignore[method-assign]


def _ends_early(strike: Strike) -> None:
    # The loader drops a last batch that is not whole.
    num_samples = strike.step * strike.global_batch_size - 1
    sft_dataset.SftDataset.__len__ = lambda self: num_samples  # type: ignore[method-assign]


def _other_dtype(strike: Strike) -> None:
    _of_rows(lambda row: row.update(loss_mask=row["loss_mask"].double()))


def _no_cu_seqlens(strike: Strike) -> None:
    _of_rows(lambda row: row.pop("cu_seqlens"))


def _falling_cu_seqlens(strike: Strike) -> None:
    length = torch.tensor([0, 5, 3], dtype=torch.int32)
    _of_rows(lambda row: row.update(cu_seqlens=length), of_sample=strike.sample)


def _short_labels(strike: Strike) -> None:
    _of_rows(lambda row: row.update(labels=row["labels"][:-1]), of_sample=strike.sample)


def _nan_mask(strike: Strike) -> None:
    _of_rows(lambda row: row["loss_mask"].fill_(float("nan")), of_sample=strike.sample)


def _negative_token(strike: Strike) -> None:
    _of_rows(lambda row: row["tokens"].__setitem__(0, -7), of_sample=strike.sample)


def _other_data(strike: Strike) -> None:
    original = sft_dataset.SftDataset.__init__

    def reseeded(self: Any, *positional: Any, seed: int, **keywords: Any) -> None:
        original(self, *positional, seed=seed + 1, **keywords)

    sft_dataset.SftDataset.__init__ = reseeded  # type: ignore[method-assign]


def _other_version(strike: Strike) -> None:
    megatron_balance.__version__ = "0.0.1"


def _before_exchange(number: signal.Signals) -> Callable[[Strike], None]:
    def set_up(strike: Strike) -> None:
        _at_call(step_planner, "gather_sample_lengths", call=strike.step, before=lambda: strike.send(number))

    return set_up


def _during_exchange(number: signal.Signals) -> Callable[[Strike], None]:
    def set_up(strike: Strike) -> None:
        begun: list[Any] = []

        def arm() -> None:
            for name in ("irecv", "isend"):
                setattr(dist, name, begin(getattr(dist, name)))

        def begin(message: Callable[..., Any]) -> Callable[..., Any]:
            def begin_message(*positional: Any, **keywords: Any) -> Any:
                begun.append(message(*positional, **keywords))
                return SimpleNamespace(wait=lambda _: strike.send(number))  # as all are on their way

            return begin_message

        _at_call(PreparedExchange, "run", call=strike.step, before=arm)

    return set_up


def _after_exchange(number: signal.Signals) -> Callable[[Strike], None]:
    def set_up(strike: Strike) -> None:
        _at_call(PreparedExchange, "run", call=strike.step, after=lambda: strike.send(number))

    return set_up


def _while_computing(number: signal.Signals) -> Callable[[Strike], None]:
    def set_up(strike: Strike) -> None:
        # The step's own data is there, and the thread has been told to make the next.
        _at_call(StepPrefetcher, "prepare", call=strike.step, after=lambda: strike.send(number))

    return set_up


def _loader_raises(strike: Strike) -> None:
    def fail(row: dict[str, Any]) -> None:
        strike.note()
        raise OSError(5, "the disk is gone")

    _of_rows(fail, of_sample=strike.sample)


def _bug(name: str, *, module: Any) -> Callable[[Strike], None]:
    """Fails while a step is made, also when that is repeated."""

    def set_up(strike: Strike) -> None:
        original, calls = step_planner.gather_sample_lengths, 0

        def fail(*positional: Any, **keywords: Any) -> Any:
            strike.note()
            raise RuntimeError(f"a bug in {name}")

        def count(*positional: Any, **keywords: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == strike.step - (name == "split_packed"):  # samples are split before their lengths are gathered
                setattr(module, name, fail)
            return original(*positional, **keywords)

        step_planner.gather_sample_lengths = count

    return set_up


def _other_iterator(strike: Strike) -> None:
    from megatron.training import training

    stock, steps = training.train_step, itertools.count(1)

    def train_step(forward_step_func: Any, data_iterator: Any, *positional: Any, **keywords: Any) -> Any:
        if next(steps) == strike.step:
            strike.note()
            data_iterator = type(data_iterator)(map(dict, _rest_of(data_iterator)))
        return stock(forward_step_func, data_iterator, *positional, **keywords)

    training.train_step = train_step


def _rest_of(iterator: Any) -> Iterator[Any]:
    """Megatron's iterators have no `__iter__`."""
    while True:
        yield next(iterator)


def _planner_killed(strike: Strike) -> None:
    plan_process.MIN_SAMPLES = 0  # a batch of this run is too small for a process
    original, plans = plan_process.PlanProcess.plan, itertools.count(1)

    def plan(self: Any, **arguments: Any) -> Any:
        if next(plans) == strike.step:
            strike.note()
            os.kill(self.pid, signal.SIGKILL)
        return original(self, **arguments)

    plan_process.PlanProcess.plan = plan  # type: ignore[method-assign]


STRIKES: dict[str, Callable[[Strike], None]] = {
    "ends-early": _ends_early,
    "other-dtype": _other_dtype,
    "no-cu-seqlens": _no_cu_seqlens,
    "falling-cu-seqlens": _falling_cu_seqlens,
    "short-labels": _short_labels,
    "nan-mask": _nan_mask,
    "negative-token": _negative_token,
    "other-data": _other_data,
    "other-version": _other_version,
    "killed-before-exchange": _before_exchange(signal.SIGKILL),
    "killed-during-exchange": _during_exchange(signal.SIGKILL),
    "killed-after-exchange": _after_exchange(signal.SIGKILL),
    "killed-computing": _while_computing(signal.SIGKILL),
    "stopped-before-exchange": _before_exchange(signal.SIGSTOP),
    "stopped-during-exchange": _during_exchange(signal.SIGSTOP),
    "stopped-after-exchange": _after_exchange(signal.SIGSTOP),
    "stopped-computing": _while_computing(signal.SIGSTOP),
    "interrupted": _while_computing(signal.SIGINT),
    "terminated": _while_computing(signal.SIGTERM),
    "loader-raises": _loader_raises,
    "bug-in-splitting": _bug("split_packed", module=items),
    "bug-in-packing": _bug("pack_microbatch", module=packs),
    "other-iterator": _other_iterator,
    "planner-killed": _planner_killed,
}
