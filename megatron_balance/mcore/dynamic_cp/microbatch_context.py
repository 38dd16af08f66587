"""Runs the forward pass of a micro-batch in its own context-parallel group.

Megatron reads context-parallel state in several places while a micro-batch runs; each is switched:

* the script's batch functions and loss function: `parallel_state`'s group, swapped while they run;
* attention kernels: `cp_group` and `local_cp_size` of the PackedSeqParams, set as the model is called, so that
  recomputation in the backward pass finds them;
* rotary angles: the attention module's own collection of groups, replaced by a view while its forward runs;
* auxiliary losses: the router's group, replaced while its layer runs; their logged values are summed over the static
  group, the only one that all these ranks share;
* the statistics for the logged FLOP/s: Megatron divides them by `--context-parallel-size`, so they are scaled first.

Invariant: outside a forward pass and its loss function all state is that of `--context-parallel-size`.
"""

# Megatron types its getters Optional; before training they are not.
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import contextlib
import copy
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist

from megatron_balance.errors import BalanceError
from megatron_balance.mcore.dynamic_cp.groups import ContextGroups


class MicrobatchContext:
    """Switches this rank between context-parallel groups.

    Args:
        groups: of this rank.
    """

    def __init__(self, groups: ContextGroups) -> None:
        self.groups = groups

    def forward_step(
        self,
        forward_step_func: Callable[..., Any],
        data_iterator: Any,
        model: Any,
        *rest: Any,
        size: int,
        **keywords: Any,
    ) -> Any:
        """Call Megatron's forward-step function for a micro-batch that `size` ranks share.

        Args:
            forward_step_func: returns the output and the loss function.
            data_iterator: of the micro-batches, passed to the function.
            model: the chunk that it calls.
            size: context-parallel ranks of the micro-batch.
        """
        with self._parallel_state(size), self._packed_params(size, model=model), self._statistics(size):
            output, loss_func = forward_step_func(data_iterator, model, *rest, **keywords)
        if loss_func is None:
            return output, None

        @functools.wraps(loss_func)
        def loss_of_group(*loss_positional: Any, **loss_keywords: Any) -> Any:
            with self._parallel_state(size):
                return loss_func(*loss_positional, **loss_keywords)

        return output, loss_of_group

    @contextlib.contextmanager
    def rotary_group(self, attention: Any, packed_seq_params: Any) -> Iterator[None]:
        """Compute an attention module's rotary angles for the micro-batch's group in this context.

        Args:
            attention: the module.
            packed_seq_params: of the micro-batch; None, or without a size, leaves the module as it is.
        """
        size = getattr(packed_seq_params, "local_cp_size", None)
        stock = attention.pg_collection
        if size is not None and size != stock.cp.size():
            view = copy.copy(stock)  # modules share theirs
            view.cp = self.groups.of_size(size)
            attention.pg_collection = view
        try:
            yield
        finally:
            attention.pg_collection = stock

    @contextlib.contextmanager
    def router_group(self, layer: Any, packed_seq_params: Any) -> Iterator[None]:
        """Sum the router losses of a transformer layer over the micro-batch's group in this context.

        Args:
            layer: the transformer layer, with or without a router.
            packed_seq_params: as in `rotary_group`.
        """
        router = getattr(getattr(layer, "mlp", None), "router", None)
        size = getattr(packed_seq_params, "local_cp_size", None)
        if router is None or size in (None, self.groups.static_size) or not self.groups.with_tensor:
            yield
            return
        stock, own = router.tp_cp_group, self.groups.with_tensor[size]
        router.tp_cp_group = own
        try:
            yield
        finally:
            router.tp_cp_group = stock
            _log_over(stock, instead_of=own)

    @contextlib.contextmanager
    def _parallel_state(self, size: int) -> Iterator[None]:
        from megatron.core import parallel_state

        group = self.groups.of_size(size)
        stock = parallel_state._CONTEXT_PARALLEL_GROUP, parallel_state._CONTEXT_PARALLEL_GLOBAL_RANKS
        parallel_state._CONTEXT_PARALLEL_GROUP = group
        parallel_state._CONTEXT_PARALLEL_GLOBAL_RANKS = dist.get_process_group_ranks(group)
        try:
            yield
        finally:
            parallel_state._CONTEXT_PARALLEL_GROUP, parallel_state._CONTEXT_PARALLEL_GLOBAL_RANKS = stock

    @contextlib.contextmanager
    def _packed_params(self, size: int, *, model: Any) -> Iterator[None]:
        from megatron.core.utils import unwrap_model

        def stamp(module: Any, positional: Any, keywords: dict[str, Any]) -> None:
            params = keywords.get("packed_seq_params")
            if params is None:
                raise BalanceError(
                    f"{type(module).__name__} was called without packed_seq_params, which carry the context-parallel "
                    "size of a micro-batch: pass them by keyword, or train without --balance-context-parallel."
                )
            params.cp_group, params.local_cp_size = self.groups.of_attention(size), size

        handle = unwrap_model(model).register_forward_pre_hook(stamp, with_kwargs=True)
        try:
            yield
        finally:
            handle.remove()

    @contextlib.contextmanager
    def _statistics(self, size: int) -> Iterator[None]:
        """Count a pack once: Megatron sums it over `size` ranks and divides by the static size."""
        training = sys.modules.get("megatron.training.training")  # absent in a loop on megatron.core alone
        before = getattr(training, "_seqlen_stats_in_iteration", None)
        before = None if before is None else before.clone()
        yield
        counted = getattr(training, "_seqlen_stats_in_iteration", None)
        if counted is not None and size != self.groups.static_size:
            start = 0 if before is None else before
            counted.copy_(start + (counted - start) * (self.groups.static_size / size))


def _log_over(group: Any, *, instead_of: Any) -> None:
    """Make Megatron sum the recorded router losses over `group`, in place of `instead_of`."""
    from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker

    for entry in get_moe_metrics_tracker().metrics.values():
        if entry.reduce_group is instead_of:
            entry.reduce_group = group
