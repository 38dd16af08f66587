"""Trains and counts the messages between pipeline stages: run by __main__.py and by the tests.

Each rank writes RECORD_DIR/rankN.jsonl, a line a step: what `P2PCommunicator._communicate` sent and waited for in it.
"""

from __future__ import annotations

import functools
import json
import os
import threading
from collections import Counter
from typing import Any, TextIO

from record_steps import train_wrapped
from torch import Tensor
from torch.overrides import TorchFunctionMode

from megatron_balance.hooking.patches import Function, Hook
from megatron_balance.mcore import hooks

_C10D = "torch.distributed.distributed_c10d"
_COMMUNICATOR = "megatron.core.pipeline_parallel.p2p_communication:P2PCommunicator"

FIGURES = ("messages", "shape_messages", "bytes", "device_waits", "reads_by_host", "compared")
"""Of a step on one rank: tensors sent, those of them that are shapes, their bytes; `torch.cuda.synchronize` calls;
`tolist` and `item` calls, each a wait on a GPU; shapes from the plan that were compared with exchanged ones."""


WAY = "MESSAGES_WAY"
"""The environment variable that says where shapes come from: `exchanged` before every message, as in Megatron,
`planned`, or `compared`: planned and exchanged both, and the run ends where they differ."""


def main() -> None:
    """Count while the script trains."""
    count = Count()
    rows = [
        ("torch.cuda:synchronize", ("torch.cuda",), _waiting),
        (f"{_C10D}:isend", (_C10D, "torch.distributed"), _sending),
        (f"{_COMMUNICATOR}._communicate", (_COMMUNICATOR,), _in_message),
        (f"{_COMMUNICATOR}._communicate_shapes", (_COMMUNICATOR,), _WAYS[os.environ[WAY]]),
    ]
    also = [
        Hook(
            target=target,
            bound_in=bound_in,
            parameters=(),
            wrap=functools.partial(wrap, count=count),
            why="counts",
            until="Megatron counts its messages",
        )
        for target, bound_in, wrap in rows
    ]
    train_wrapped(functools.partial(_stepping, count=count), why="writes the counts of a step", also=also)


class Count(Counter[str]):
    """The figures of a step so far, while a message is on its way."""

    def __init__(self) -> None:
        super().__init__()
        self.in_message = False

    def add(self, figure: str, number: int = 1) -> None:
        """Add to a figure; what is outside of messages is not counted, nor what another thread sends meanwhile."""
        if self.in_message and threading.current_thread() is threading.main_thread():
            self[figure] += number


class _Reads(TorchFunctionMode):
    """Counts tensors that are read by the host."""

    def __init__(self, count: Count) -> None:
        super().__init__()
        self._count = count

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (Tensor.tolist, Tensor.item):
            self._count.add("reads_by_host")
        return func(*args, **(kwargs or {}))


def _stepping(train_step: Function, *, out: TextIO, count: Count) -> Function:
    @functools.wraps(train_step)
    def wrapper(*positional: Any, **keywords: Any) -> Any:
        count.clear()
        result = train_step(*positional, **keywords)
        balanced = hooks.current()
        assert balanced is not None, "the run balances"
        assert balanced.last_step is not None, "a step was run"
        row = {"microbatch_tokens": balanced.last_step.microbatch_tokens} | {name: count[name] for name in FIGURES}
        print(json.dumps(row), file=out, flush=True)
        return result

    return wrapper


def _in_message(communicate: Function, *, count: Count) -> Function:
    @functools.wraps(communicate)
    def wrapper(*positional: Any, **keywords: Any) -> Any:
        count.in_message = True
        try:
            with _Reads(count):
                return communicate(*positional, **keywords)
        finally:
            count.in_message = False

    return wrapper


def _waiting(synchronize: Function, *, count: Count) -> Function:
    @functools.wraps(synchronize)
    def wrapper(*positional: Any, **keywords: Any) -> Any:
        count.add("device_waits")
        return synchronize(*positional, **keywords)

    return wrapper


def _sending(isend: Function, *, count: Count) -> Function:
    @functools.wraps(isend)
    def wrapper(tensor: Tensor, *positional: Any, **keywords: Any) -> Any:
        count.add("messages")
        count.add("bytes", tensor.numel() * tensor.element_size())
        if not tensor.is_floating_point():  # activations and gradients are
            count.add("shape_messages")
        inside, count.in_message = count.in_message, False  # it calls itself where torch functions are overridden
        try:
            return isend(tensor, *positional, **keywords)
        finally:
            count.in_message = inside

    return wrapper


def _exchanged(communicate_shapes: Function, *, count: Count) -> Function:
    return communicate_shapes.__wrapped__  # pyright: ignore[reportFunctionMemberAccess]


def _planned(communicate_shapes: Function, *, count: Count) -> Function:
    return communicate_shapes


def _compared(communicate_shapes: Function, *, count: Count) -> Function:
    exchange = _exchanged(communicate_shapes, count=count)

    @functools.wraps(communicate_shapes)
    def wrapper(*arguments: Any) -> Any:
        balanced = hooks.current()
        assert balanced is not None, "the run balances"
        assert balanced.pipeline_shapes is not None, "the plan answers"
        ours, megatrons = communicate_shapes(*arguments), exchange(*arguments)
        assert ours == megatrons, f"the plan says {ours}, the stages say {megatrons}"
        count.add("compared", sum(any(shape) for shape in megatrons))
        return ours

    return wrapper


_WAYS = {"exchanged": _exchanged, "planned": _planned, "compared": _compared}
