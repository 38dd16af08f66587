"""Sends the rows of worker-group calls in balanced order, and puts results back in the caller's order.

A call of a worker group dispatches its arguments, executes, and collects, in one thread, which keeps the row order:

    dispatch   pad where verl would, order rows (one order for all arguments), let verl cut them into parts
    collect    let verl join the results, put rows back in order
    then       verl trims the padding, which is at the end again

Invariants: all arguments of one call have the same order; each mini-batch holds the same rows as without the adapter;
verl alone handles calls whose rows have no known length, or whose arguments are futures or keys.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import numpy as np
from tensordict import TensorDict
from verl.protocol import DataProto, DataProtoFuture, _padding_size_key
from verl.utils import tensordict_utils

from megatron_balance.adapters.kit import Function
from megatron_balance.adapters.verl import Settings, while_active
from megatron_balance.adapters.verl.rows import RowOrder, minibatches_of_parts, order_rows, row_lengths, select_rows
from megatron_balance.errors import BalanceError


@dataclass
class _Call:
    """A worker-group call under way: the order of its rows, once they have one."""

    method_name: str
    order: RowOrder | None = None


_call: ContextVar[_Call | None] = ContextVar("_call", default=None)
"""The innermost call of this thread: verl may make one while it dispatches another."""


def _remembered(method: Function, method_name: str, /, *args: Any, **kwargs: Any) -> Any:
    """The method's result; the order of its rows is remembered while it runs."""
    outer = _call.set(_Call(method_name))
    try:
        return method(*args, **kwargs)
    finally:
        _call.reset(outer)


def _collected(collect_fn: Function, worker_group: Any, output: Any) -> Any:
    """verl's collected output, in the caller's order."""
    output, call = collect_fn(worker_group, output), _call.get()
    if call is None or call.order is None:
        return output
    return in_order(output, order=call.order, method_name=call.method_name)


class OrderedFuture(DataProtoFuture):
    """A future of which `dispatch_fn` puts the rows in order; its parts are taken from the rows in order."""

    def chunk(self, chunks: int) -> list[DataProtoFuture]:
        """Futures of the parts."""
        parts = super().chunk(chunks)
        for part in parts:
            part.dispatch_fn = functools.partial(_one_after_other, self.dispatch_fn, part.dispatch_fn)
        return parts


def _one_after_other(first: Function, second: Function, output: Any) -> Any:
    return second(first(output))


def in_order(output: Any, *, order: RowOrder, method_name: str) -> Any:
    """A method's joined result with its rows in the caller's order.

    It has one row for each row dispatched, which are reordered; or none (metrics), one a rank, or a list a rank, which
    are returned unchanged. With another number of rows their order is unknown.
    """
    if isinstance(output, DataProtoFuture):
        restore = functools.partial(in_order, order=order, method_name=method_name)
        return OrderedFuture(output.collect_fn, output.futures, restore)
    if isinstance(output, TensorDict):
        num_rows = len(output) if len(output.batch_size) else 0
    elif isinstance(output, DataProto):
        num_rows = len(output)
    else:
        return output
    if num_rows == order.rows.size:
        return select_rows(output, order.places)
    if num_rows in (0, len(order.parts)):
        return output
    raise BalanceError(
        f"{method_name} returned {num_rows} rows for {order.rows.size}: they cannot be put back in order. Name the "
        "methods to balance in install(dispatch=...), without this one."
    )


def bind_balanced(bind: Function, *, before: Callable[[], None]) -> Function:
    """Wraps verl's `func_generator`, which makes the methods of a worker group.

    `before` is called first: the process that makes worker groups is the one that has the trainer.
    """

    def balanced(
        _: Settings,
        worker_group: Any,
        method_name: str,
        dispatch_fn: Callable[..., Any],
        collect_fn: Callable[..., Any],
        execute_fn: Callable[..., Any],
        blocking: bool,
    ) -> Any:
        before()
        collect = functools.partial(_collected, collect_fn)  # it is pickled
        method = bind(worker_group, method_name, dispatch_fn, collect, execute_fn, blocking)
        return functools.partial(_remembered, method, method_name)

    return while_active(bind, balanced)


def split_balanced(split: Function, *, pads: bool) -> Function:
    """Wraps verl's `_split_args_kwargs_data_proto`, or its variant that pads."""

    def balanced(settings: Settings, chunks: int, *args: Any, **kwargs: Any) -> Any:
        call, arguments = _call.get(), [*args, *kwargs.values()]
        if call is None or not settings.dispatches(call.method_name):
            return split(chunks, *args, **kwargs)
        padding = _num_padding_rows(arguments, chunks=chunks, pads=pads)
        if padding is None:
            return split(chunks, *args, **kwargs)
        if padding:
            # In place and once each, as verl does.
            for argument in {id(argument): argument for argument in arguments}.values():
                argument.padding(padding)
        call.order = order = _order_of(arguments, chunks=chunks, settings=settings)
        if order is not None:
            args = tuple(select_rows(argument, order.rows) for argument in args)
            kwargs = {key: select_rows(argument, order.rows) for key, argument in kwargs.items()}
        splitted_args, splitted_kwargs = split(chunks, *args, **kwargs)
        if padding:
            # verl found no padding necessary; it trims by this number after collecting.
            splitted_kwargs[_padding_size_key] = padding
        return splitted_args, splitted_kwargs

    return while_active(split, balanced)


def _num_padding_rows(arguments: list[Any], *, chunks: int, pads: bool) -> int | None:
    """Rows that verl would add; None where the call is left to verl."""
    if not arguments or not all(isinstance(argument, (DataProto, TensorDict)) for argument in arguments):
        return None
    if any(isinstance(argument, TensorDict) and not len(argument.batch_size) for argument in arguments):
        return None
    sizes = {len(argument) for argument in arguments}
    if len(sizes) > 1 or 0 in sizes or all(row_lengths(argument) is None for argument in arguments):
        return None
    padding = -sizes.pop() % chunks
    padded = all(isinstance(argument, DataProto) and argument.is_padding_enabled() for argument in arguments)
    return None if padding and not (pads and padded) else padding


def _order_of(arguments: list[Any], *, chunks: int, settings: Settings) -> RowOrder | None:
    """The one order of a call's arguments; None where verl's own mini-batches cannot be kept."""
    lengths = next(found for argument in arguments if (found := row_lengths(argument)) is not None)
    minibatch_rows = lengths.size
    size = 1
    for argument in arguments:
        if (given := _flag(argument, "mini_batch_size")) is not None:
            minibatch_rows = int(given)
        elif (given := _flag(argument, "num_mini_batch")) is not None:
            minibatch_rows = lengths.size // int(given)
        size = int(_flag(argument, "force_group_size") or size)
    per_rank = minibatch_rows // chunks
    cut_evenly = minibatch_rows % chunks == 0 and lengths.size % minibatch_rows == 0 and per_rank % size == 0
    if not cut_evenly:
        return None
    return order_rows(
        lengths,
        num_ranks=chunks,
        cost_model=settings.cost_model,
        minibatches=minibatches_of_parts(lengths.size, num_ranks=chunks, minibatch_rows=minibatch_rows),
        units=np.arange(lengths.size) // size,
    )


def _flag(argument: Any, name: str) -> Any:
    """A value that verl stores beside the rows: in `meta_info`, or in the TensorDict itself."""
    if isinstance(argument, DataProto):
        return argument.meta_info.get(name)
    return tensordict_utils.get_non_tensor_data(argument, key=name, default=None)
