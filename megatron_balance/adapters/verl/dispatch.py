"""Sends the rows of worker-group calls in balanced order, and puts results back in the caller's order.

A call of a worker group dispatches its arguments, executes, and collects, in one thread. Between the first and the
last the row order is kept in that thread:

    dispatch   pad where verl would, order rows (one order for all arguments), let verl cut them into parts
    collect    let verl join the results, put rows back in order
    then       verl trims the padding, which is at the end again

Invariants: all arguments of one call have the same order; each mini-batch holds the same rows as without the adapter;
verl alone handles calls whose rows have no known length, or whose arguments are futures or keys.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tensordict import TensorDict
from verl.protocol import DataProto, DataProtoFuture, _padding_size_key
from verl.utils import tensordict_utils

from megatron_balance.adapters.kit import Function
from megatron_balance.adapters.verl import Settings, adapter, as_hook, while_active
from megatron_balance.adapters.verl.plan import RowOrder, minibatches_of_parts, order_rows
from megatron_balance.adapters.verl.rows import row_lengths, select_rows
from megatron_balance.errors import BalanceError

_Key = tuple[int, str]
"""A worker group and one of its methods."""


class _Calls(threading.local):
    """The worker-group calls under way in this thread: verl may make one while it dispatches another.

    Attributes:
        dispatching: the innermost call whose arguments are being cut.
        orders: of each call between its dispatch and its collect, where there is one.
    """

    def __init__(self) -> None:
        self.dispatching: _Key | None = None
        self.orders: dict[_Key, RowOrder] = {}


_calls = _Calls()


@dataclass(frozen=True)
class BalancedDispatch:
    """Wraps a method's dispatch function: arguments are ordered while verl cuts them. Can be pickled."""

    dispatch_fn: Callable[..., Any]
    method_name: str

    def __call__(self, worker_group: Any, *args: Any, **kwargs: Any) -> Any:
        """verl's dispatched arguments; their order is kept for `BalancedCollect`."""
        outer, _calls.dispatching = _calls.dispatching, (id(worker_group), self.method_name)
        # Left from a call that failed.
        _calls.orders.pop(_calls.dispatching, None)
        try:
            return self.dispatch_fn(worker_group, *args, **kwargs)
        finally:
            _calls.dispatching = outer


@dataclass(frozen=True)
class BalancedCollect:
    """Wraps the method's collect function: rows are put back in order after it. Can be pickled."""

    collect_fn: Callable[..., Any]
    method_name: str

    def __call__(self, worker_group: Any, output: Any) -> Any:
        """verl's collected output, in the caller's order."""
        order = _calls.orders.pop((id(worker_group), self.method_name), None)
        output = self.collect_fn(worker_group, output)
        return output if order is None else in_order(output, order=order, method_name=self.method_name)


@dataclass
class OrderedFuture(DataProtoFuture):
    """A future whose rows are put in order when they arrive."""

    _: KW_ONLY
    order: RowOrder
    method_name: str

    def get(self) -> Any:
        """The result, its rows in the caller's order."""
        inner = DataProtoFuture(self.collect_fn, self.futures)
        output = in_order(inner.get(), order=self.order, method_name=self.method_name)
        return output if self.dispatch_fn is None else self.dispatch_fn(output)

    def chunk(self, chunks: int) -> list[DataProtoFuture]:
        """Futures of the parts; each orders the whole result before it takes its part."""
        parts = DataProtoFuture(self.collect_fn, self.futures).chunk(chunks)
        return [
            OrderedFuture(
                self.collect_fn, self.futures, part.dispatch_fn, order=self.order, method_name=self.method_name
            )
            for part in parts
        ]


def in_order(output: Any, *, order: RowOrder, method_name: str) -> Any:
    """A method's joined result with its rows in the caller's order.

    Args:
        output: one row for each row dispatched, which are reordered; or none (metrics), one a rank, or a list a rank,
            which are returned unchanged.
        order: the order in which rows were dispatched.
        method_name: for the message.

    Raises:
        BalanceError: the result has another number of rows, so that their order is unknown.
    """
    if isinstance(output, DataProtoFuture):
        return OrderedFuture(
            output.collect_fn, output.futures, output.dispatch_fn, order=order, method_name=method_name
        )
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
        dispatch, collect = BalancedDispatch(dispatch_fn, method_name), BalancedCollect(collect_fn, method_name)
        return bind(worker_group, method_name, dispatch, collect, execute_fn, blocking)

    return while_active(bind, balanced)


def split_balanced(split: Function, *, pads: bool) -> Function:
    """Wraps verl's `_split_args_kwargs_data_proto`, or its variant that pads."""

    @functools.wraps(split)
    def hook(chunks: int, *args: Any, **kwargs: Any) -> Any:
        settings, call = adapter.settings, _calls.dispatching
        if settings is None or call is None or not settings.dispatches(call[1]):
            return split(chunks, *args, **kwargs)
        arguments = [*args, *kwargs.values()]
        padding = _num_padding_rows(arguments, chunks=chunks, pads=pads)
        if padding is None:
            return split(chunks, *args, **kwargs)
        if padding:
            # In place and once each, as verl does.
            for argument in {id(argument): argument for argument in arguments}.values():
                argument.padding(padding)
        order = _order_of(arguments, chunks=chunks, settings=settings)
        if order is None:
            splitted_args, splitted_kwargs = split(chunks, *args, **kwargs)
        else:
            _calls.orders[call] = order
            splitted_args, splitted_kwargs = split(
                chunks,
                *[select_rows(argument, order.rows) for argument in args],
                **{key: select_rows(argument, order.rows) for key, argument in kwargs.items()},
            )
        if padding:
            # verl found no padding necessary; it trims by this number after collecting.
            splitted_kwargs[_padding_size_key] = padding
        return splitted_args, splitted_kwargs

    return as_hook(hook)


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
    minibatches: list[NDArray[np.int64]] = minibatches_of_parts(
        lengths.size, num_ranks=chunks, minibatch_rows=minibatch_rows
    )
    return order_rows(
        lengths,
        num_ranks=chunks,
        cost_model=settings.cost_model,
        minibatches=minibatches,
        force_group_size=size,
    )


def _flag(argument: Any, name: str) -> Any:
    """A value that verl stores beside the rows: in `meta_info`, or in the TensorDict itself."""
    if isinstance(argument, DataProto):
        return argument.meta_info.get(name)
    return tensordict_utils.get_non_tensor_data(argument, key=name, default=None)
