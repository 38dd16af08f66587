"""What is switched while a micro-batch runs: its context-parallel group, and keywords that its model is called with.

The ranks of one tensor-parallel rank and pipeline stage are a DP×CP group of `dp_size * cp_size` ranks,
context-parallel ranks innermost. A context-parallel group of `size` of them starts at a multiple of `size`; Megatron's
own group serves its size. What reads context-parallel state is switched: `parallel_state`'s group for scripts;
`cp_group` and `local_cp_size` of PackedSeqParams for attention kernels, also in recomputation; what modules that mix
tokens were built with (`sequence_mixers.py`); the router's group for auxiliary losses.

A forward pre-hook adds keywords that a script's forward step does not give: padding masks, for MoE routers, which then
count real tokens only (those of multi-token prediction in 0.17 take none), and PackedSeqParams under
`--balance-unpad`, whose scripts name no starts of sequences; every rank knows both.

Invariants: all ranks of the world make all groups, in one order (`setup/layout.py`), before training; outside a forward
pass and its loss function all state is that of `--context-parallel-size`, and no pre-hook is left.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_balance.errors import BalanceError
from megatron_balance.hooking import patched_attrs
from megatron_balance.mcore.setup.layout import Layout, RankCoords, make_groups
from megatron_balance.mcore.setup.settings import Settings
from megatron_balance.mcore.step.packs import Slots, pack
from megatron_balance.samples.packing import padding_mask
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


class CpGroups:
    """Switches this rank between context-parallel groups, of which every rank of the world makes all.

    `by_size` lacks the sizes that this rank is in no whole group of. MoE routers with a loss of their own
    (`for_routers`) sum over the same groups with all their tensor-parallel ranks. `num_tokens` is that of the newest
    micro-batch.
    """

    def __init__(self, topology: Topology, *, layout: Layout, timeout: timedelta, for_routers: bool) -> None:
        from megatron.core import packed_seq_params, parallel_state

        # Attention of Megatron's dev branch asserts a group, and leaves one of a single rank alone.
        self._names_every_group = hasattr(packed_seq_params, "resolve_cp_group")

        def groups(static: Any, *, over_tensor_ranks: bool) -> dict[int, dist.ProcessGroup]:
            by_size = {topology.cp_size: static}
            for size in topology.dynamic_cp_sizes:

                def key(place: RankCoords, size: int = size) -> Hashable | None:
                    block = (place.dp * topology.cp_size + place.cp) // size
                    dp_cp_group = place.pp, None if over_tensor_ranks else place.tp
                    return (*dp_cp_group, block) if (block + 1) * size <= topology.dp_cp_size else None

                if size != topology.cp_size:
                    group = make_groups(layout.groups(key), timeout=timeout, backend=dist.get_backend(static))
                    by_size |= {} if group is None else {size: group}
            return by_size

        self.by_size = groups(parallel_state.get_context_parallel_group(), over_tensor_ranks=False)
        self._static_size = topology.cp_size
        self._router_groups: Mapping[int, dist.ProcessGroup] = self.by_size if for_routers else {}
        if for_routers and topology.tp_size > 1:
            self._router_groups = groups(parallel_state.get_tensor_and_context_parallel_group(), over_tensor_ranks=True)
        self.mean_weight, self.num_tokens = 1.0, 0
        self.recorded: Recorded = lambda value, groups: (value, groups)
        self._engine_class = _engine_class()
        if self._engine_class is not None and self._engine_class.cp_stream is None:
            self._engine_class.cp_stream = torch.cuda.Stream()

    def restore_engine_attention(self, model: Any) -> None:
        """Set every attention module of Transformer Engine back to the static group."""
        if self._engine_class is None:
            return
        group = self.attention_group(self._static_size)
        ranks = None if group is None else dist.get_process_group_ranks(group)
        for chunk in model if isinstance(model, list) else [model]:
            for module in chunk.modules():
                if isinstance(module, self._engine_class):
                    stream = None if group is None else type(module).cp_stream
                    module.set_context_parallel_group(group, ranks, stream, module.cp_comm_type)

    def forward_step(
        self,
        forward_step_func: Callable[..., Any],
        data_iterator: Any,
        model: Any,
        *rest: Any,
        size: int,
        num_tokens: int,
        **more: Any,
    ) -> Any:
        """Call Megatron's forward-step function for a micro-batch that `size` ranks share, of so many tokens."""
        self.num_tokens = num_tokens
        with self._parallel_state(size), self._packed_params(size, model=model):
            output, loss_func = forward_step_func(data_iterator, model, *rest, **more)
        if loss_func is None:
            return output, None

        @functools.wraps(loss_func)
        def loss_of_group(*loss_positional: Any, **loss_keywords: Any) -> Any:
            with self._parallel_state(size):
                return loss_func(*loss_positional, **loss_keywords)

        return output, loss_of_group

    def group_of(self, packed_seq_params: Any) -> dist.ProcessGroup | None:
        """The group that these params name, where it is not that of all modules."""
        size = getattr(packed_seq_params, "local_cp_size", None)
        return None if size in (None, self._static_size) else self.by_size[size]

    @contextlib.contextmanager
    def router_group(self, layer: Any, packed_seq_params: Any) -> Iterator[None]:
        """Sum the router losses of a transformer layer, if it has any, over the group of these params."""
        router = getattr(getattr(layer, "mlp", None), "router", None)
        size = getattr(packed_seq_params, "local_cp_size", None)
        if router is None or size in (None, self._static_size) or not self._router_groups:
            yield
            return
        stock, group = router.tp_cp_group, self._router_groups[size]

        def recorded(value: Any, groups: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
            if groups.get("reduce_group") is group:
                groups = groups | {"reduce_group": stock}
            return value * (1.0 if groups.get("avg_group") is None else self.mean_weight), groups

        with (
            self.weighing_logged_means(size),
            patched_attrs(router, tp_cp_group=group),
            patched_attrs(self, recorded=recorded),
        ):
            yield

    def weighing_logged_means(self, size: int) -> AbstractContextManager[None]:
        """Have `mean_weight` undo that a mean over all ranks counts a micro-batch once for each rank of its group."""
        return patched_attrs(self, mean_weight=self._static_size / size)

    def _parallel_state(self, size: int) -> AbstractContextManager[None]:
        from megatron.core import parallel_state

        group = self.by_size[size]
        ranks = dist.get_process_group_ranks(group)
        return patched_attrs(parallel_state, _CONTEXT_PARALLEL_GROUP=group, _CONTEXT_PARALLEL_GLOBAL_RANKS=ranks)

    def attention_group(self, size: int) -> dist.ProcessGroup | None:
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
                    "size of a micro-batch: pass them by keyword, or train without --balance-dynamic-cp."
                )
            params.cp_group, params.local_cp_size = self.attention_group(size), size

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


def router_masks(slots: Slots, *, model: Any, topology: Topology, place: RankCoords) -> list[Tensor]:
    """True where a token is padding, on the device: `[1, t]` a micro-batch, t tokens of this context-parallel rank.

    One copy to the device serves the step. A model of which a chunk takes none is refused, on every rank.
    """
    for chunk in model if isinstance(model, list) else [model]:
        _refuse_without(
            chunk,
            "padding_mask",
            "without which MoE routers count padding in --moe-aux-loss-coeff, --moe-z-loss-coeff and "
            "--moe-router-enable-expert-bias",
            "train without these flags or --balance-*",
        )
    dp_cp_rank = place.dp * topology.cp_size + place.cp
    masks = [
        padding_mask(
            lengths,
            num_tokens=num_tokens,
            token_multiple=topology.with_cp_size(size).token_multiple,
            cp_size=size,
            cp_rank=dp_cp_rank % size,
        )
        for lengths, num_tokens, size in zip(slots.sequence_lengths, slots.num_tokens, slots.cp_sizes, strict=True)
    ]
    whole = torch.from_numpy(np.concatenate(masks)).pin_memory().cuda(non_blocking=True)
    return list(whole.unsqueeze(0).split([mask.size for mask in masks], dim=1))


def called_with_mask(
    mask: Tensor, *, model: Any, topology: Topology, place: RankCoords
) -> AbstractContextManager[None]:
    """Have a chunk called with a router mask in this context, or with the share of a sequence-parallel rank.

    GPTModel splits a mask itself, and on the first pipeline stage only.
    """
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.utils import unwrap_model

    inner: Any = unwrap_model(model)
    splits = isinstance(inner, GPTModel) and bool(inner.pre_process)
    if topology.sequence_parallel and not splits:
        mask = mask.chunk(topology.tp_size, dim=1)[place.tp]
    return _called_with(model, padding_mask=mask)


def packed_seq_params(microbatch: Mapping[str, Any]) -> Any:
    """Megatron's PackedSeqParams of a packed micro-batch, for the model.

    Args:
        microbatch: `cu_seqlens` int32 `[1, num_sequences + 1]`, under context parallelism `cu_seqlens_padded` too, and
            `max_seqlen` `[1]`; as the iterator hands it out, on the CPU: from a GPU two numbers would be read back, for
            which the host waits.
    """
    from megatron.core.packed_seq_params import PackedSeqParams

    padded = microbatch.get("cu_seqlens_padded")
    starts: Tensor = (microbatch["cu_seqlens"] if padded is None else padded).squeeze(0)
    max_seqlen, num_tokens = int(microbatch["max_seqlen"].max()), int(starts[-1])
    starts = starts.cuda(non_blocking=True)
    padded = None if padded is None else starts
    # Mamba layers tell sequences apart by `seq_idx`, which is made from this number; without it their state leaks.
    whole: Any = {"total_tokens": num_tokens} if "total_tokens" in PackedSeqParams.__dataclass_fields__ else {}
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=starts,
        cu_seqlens_kv=starts,
        cu_seqlens_q_padded=padded,  # pyright: ignore[reportArgumentType]  # Megatron's hint leaves out None
        cu_seqlens_kv_padded=padded,  # pyright: ignore[reportArgumentType]
        max_seqlen_q=max_seqlen,
        max_seqlen_kv=max_seqlen,
        **whole,
    )


def packed_params_of(slots: Slots, *, settings: Settings) -> list[Any]:
    """Megatron's PackedSeqParams of each micro-batch, on the device; without context parallelism."""
    packs = pack(slots, topology=settings.topology, few_shapes=settings.few_shapes, pin_memory=False)
    return [packed_seq_params(starts) for starts in packs]


def called_with_packs(params: Any, *, model: Any) -> AbstractContextManager[None]:
    """Have a chunk called with PackedSeqParams in this context; one that takes none is refused."""
    reason = "so that samples of a pack would attend to one another"
    _refuse_without(model, "packed_seq_params", reason, "train without --balance-unpad")
    return _called_with(model, packed_seq_params=params)


def _refuse_without(model: Any, name: str, reason: str, instead: str) -> None:
    from megatron.core.utils import unwrap_model

    inner: Any = unwrap_model(model)
    if name not in inspect.signature(inner.forward).parameters:
        raise BalanceError(
            f"{type(inner).__name__}.forward takes no {name}, {reason}: add the parameter and hand it to the decoder, "
            f"or {instead}."
        )


@contextlib.contextmanager
def _called_with(model: Any, **added: Any) -> Iterator[None]:
    from megatron.core.utils import unwrap_model

    def add(_: Any, positional: Any, keywords: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return positional, keywords | added

    inner: Any = unwrap_model(model)  # without the wrappers for data parallelism and precision
    handle = inner.register_forward_pre_hook(add, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()
