"""Context-parallel groups of several sizes, and the forward pass of a micro-batch in one of them.

The ranks of one tensor-parallel rank and pipeline stage are a *lane* of `dp_size * cp_size` *leaves*, context-parallel
ranks innermost. A group of `size` leaves starts at a multiple of `size`. Megatron's own group serves its size. What
reads context-parallel state while a micro-batch runs is switched: `parallel_state`'s group for scripts; `cp_group` and
`local_cp_size` of PackedSeqParams for attention kernels, also in recomputation; the attention module's collection of
groups for rotary angles; the router's group for auxiliary losses.

Invariants: all ranks of the world make all groups, in one order (`setup/layout.py`), before training; outside a forward
pass and its loss function all state is that of `--context-parallel-size`.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from megatron_balance.errors import BalanceError
from megatron_balance.hooking import holding
from megatron_balance.mcore.setup.layout import Layout, Place, make_groups
from megatron_balance.topology import Topology

Recorded = Callable[[Any, dict[str, Any]], tuple[Any, dict[str, Any]]]
"""Maps a loss that a router records, and the groups of ranks that it names, to those of the static group."""


def connect(by_size: Mapping[int, dist.ProcessGroup]) -> int:
    """Exchange a number with both neighbours in each group, before the first step: the bytes of device memory taken.

    Transformer Engine sends keys and values around a ring of more than two ranks in messages of their own, for each
    of which NCCL connects a pair of ranks when it first talks (context_parallel.py:124-133 of 2.18): in the middle of a
    run, when memory is full. The order of calls is that of its ring, even ranks first.
    """
    on_gpu = any(dist.get_backend(group) == "nccl" for group in by_size.values())
    device = "cuda" if on_gpu else "cpu"
    free = torch.cuda.mem_get_info()[0] if on_gpu else 0
    for size, group in sorted(by_size.items()):
        if size == 1:
            continue
        rank, numbers = group.rank(), torch.zeros(2, device=device)
        send = functools.partial(dist.isend, numbers[0], group=group, group_dst=(rank + 1) % size)
        receive = functools.partial(dist.irecv, numbers[1], group=group, group_src=(rank - 1) % size)
        dist.all_reduce(torch.zeros(1, device=device), group=group)
        for work in [call() for call in ((send, receive) if rank % 2 == 0 else (receive, send))]:
            assert work is not None, "this rank is a member"
            work.wait()
    return max(free - torch.cuda.mem_get_info()[0], 0) if on_gpu else 0


class MicrobatchContext:
    """Switches this rank between context-parallel groups, of which every rank of the world makes all.

    `by_size` lacks the sizes that this rank's leaf is in no whole group of. MoE routers with a loss of their own
    (`for_routers`) sum over the same groups with all their tensor-parallel ranks.
    """

    def __init__(self, topology: Topology, *, layout: Layout, timeout: timedelta, for_routers: bool) -> None:
        from megatron.core import packed_seq_params, parallel_state

        # Attention of Megatron's dev branch asserts a group, and leaves one of a single rank alone.
        self._names_every_group = hasattr(packed_seq_params, "resolve_cp_group")

        def groups(static: Any, *, over_tensor_ranks: bool) -> dict[int, dist.ProcessGroup]:
            by_size = {topology.cp_size: static}
            for size in topology.dynamic_cp_sizes:

                def key(place: Place, size: int = size) -> Hashable | None:
                    block = (place.dp * topology.cp_size + place.cp) // size
                    lane = place.pp, None if over_tensor_ranks else place.tp
                    return (*lane, block) if (block + 1) * size <= topology.dp_cp_size else None

                if size != topology.cp_size:
                    group = make_groups(layout.groups(key), timeout=timeout, backend=dist.get_backend(static))
                    by_size |= {} if group is None else {size: group}
            return by_size

        self.by_size = groups(parallel_state.get_context_parallel_group(), over_tensor_ranks=False)
        self._static_size = topology.cp_size
        self._of_routers: Mapping[int, dist.ProcessGroup] = self.by_size if for_routers else {}
        if for_routers and topology.tp_size > 1:
            self._of_routers = groups(parallel_state.get_tensor_and_context_parallel_group(), over_tensor_ranks=True)
        self.recorded: Recorded = lambda value, groups: (value, groups)
        self._engine_class = _engine_class()
        if self._engine_class is not None and self._engine_class.cp_stream is None:
            self._engine_class.cp_stream = torch.cuda.Stream()

    def restore_engine_attention(self, model: Any) -> None:
        """Set every attention module of Transformer Engine back to the static group."""
        if self._engine_class is None:
            return
        group = self._of_attention(self._static_size)
        ranks = None if group is None else dist.get_process_group_ranks(group)
        for chunk in model if isinstance(model, list) else [model]:
            for module in chunk.modules():
                if isinstance(module, self._engine_class):
                    stream = None if group is None else type(module).cp_stream
                    module.set_context_parallel_group(group, ranks, stream, module.cp_comm_type)

    def forward_step(
        self, forward_step_func: Callable[..., Any], data_iterator: Any, model: Any, *rest: Any, size: int, **more: Any
    ) -> Any:
        """Call Megatron's forward-step function for a micro-batch that `size` ranks share."""
        with self._parallel_state(size), self._packed_params(size, model=model):
            output, loss_func = forward_step_func(data_iterator, model, *rest, **more)
        if loss_func is None:
            return output, None

        @functools.wraps(loss_func)
        def loss_of_group(*loss_positional: Any, **loss_keywords: Any) -> Any:
            with self._parallel_state(size):
                return loss_func(*loss_positional, **loss_keywords)

        return output, loss_of_group

    def rotary_group(self, attention: Any, packed_seq_params: Any) -> AbstractContextManager[None]:
        """Compute an attention module's rotary angles for the group of these params, if they have one."""
        size = getattr(packed_seq_params, "local_cp_size", None)
        if size in (None, self._static_size):
            return contextlib.nullcontext()
        view = copy.copy(attention.pg_collection)  # modules share theirs
        view.cp = self.by_size[size]
        return holding(attention, pg_collection=view)

    @contextlib.contextmanager
    def router_group(self, layer: Any, packed_seq_params: Any) -> Iterator[None]:
        """Sum the router losses of a transformer layer, if it has any, over the group of these params."""
        router = getattr(getattr(layer, "mlp", None), "router", None)
        size = getattr(packed_seq_params, "local_cp_size", None)
        if router is None or size in (None, self._static_size) or not self._of_routers:
            yield
            return
        stock, group = router.tp_cp_group, self._of_routers[size]

        def recorded(value: Any, groups: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
            if groups.get("reduce_group") is group:
                groups = groups | {"reduce_group": stock}
            # A mean over all ranks counts a micro-batch once for each rank of its group.
            share = 1.0 if groups.get("avg_group") is None else self._static_size / size
            return value * share, groups

        with holding(router, tp_cp_group=group), holding(self, recorded=recorded):
            yield

    def _parallel_state(self, size: int) -> AbstractContextManager[None]:
        from megatron.core import parallel_state

        group = self.by_size[size]
        ranks = dist.get_process_group_ranks(group)
        return holding(parallel_state, _CONTEXT_PARALLEL_GROUP=group, _CONTEXT_PARALLEL_GLOBAL_RANKS=ranks)

    def _of_attention(self, size: int) -> dist.ProcessGroup | None:
        """The group for attention kernels; None for one rank, where releases would exchange keys with nobody."""
        return None if size == 1 and not self._names_every_group else self.by_size[size]

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
            params.cp_group, params.local_cp_size = self._of_attention(size), size

        inner: Any = unwrap_model(model)
        handle = inner.register_forward_pre_hook(stamp, with_kwargs=True)
        try:
            yield
        finally:
            handle.remove()


def _engine_class() -> Any:
    """Megatron's attention over Transformer Engine, None without it."""
    try:
        from megatron.core.extensions.transformer_engine import HAVE_TE, TEDotProductAttention
    except ImportError:
        return None
    return TEDotProductAttention if HAVE_TE else None
