"""Switches of Megatron's state for one running micro-batch, from its forward pass to its loss.

Megatron's arguments hold its shape; `parallel_state`, PackedSeqParams, attention modules and routers name its
context-parallel group; a forward pre-hook calls the model with keywords that a script's forward step does not give:
padding masks, for MoE routers, which then count real tokens only (those of multi-token prediction in 0.17 take none),
and PackedSeqParams under `--balance-unpad`, whose scripts name no starts of sequences; every rank knows both.

The ranks of one tensor-parallel rank and pipeline stage are a DP×CP group of `dp_size * cp_size` ranks,
context-parallel ranks innermost. A context-parallel group of `size` of them starts at a multiple of `size`; Megatron's
own group serves its size.

Invariants: all ranks of the world make all groups, in one order (`setup/layout.py`), before training; whatever is
switched is restored as the forward pass and its loss end, also when they fail; engine attention, which recomputation
in the backward pass needs as it was, when the step ends.
"""

from __future__ import annotations

import contextlib
import functools
from argparse import Namespace
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
from megatron_balance.mcore.loss_weights import router_loss_scale, token_weights, with_weighted_loss
from megatron_balance.mcore.prefix_sharing import PrefixSharing
from megatron_balance.mcore.prepare import BalancedStep, Microbatch, MicrobatchSizes, pack
from megatron_balance.mcore.setup.layout import Layout, RankCoords, make_groups
from megatron_balance.mcore.setup.settings import Settings
from megatron_balance.samples.packing import padding_mask
from megatron_balance.samples.prefix_packing import PrefixTree
from megatron_balance.samples.unpacking import DERIVED_KEYS
from megatron_balance.topology import Topology


class RunningStep(Iterator[Microbatch]):
    """A step while Megatron's schedule runs it: the iterator, which hands out the micro-batch that runs forward.

    `args` are those of Megatron's own loop, `timed` measures a pass. `token_weights` are those of the micro-batch that
    runs forward, None without weights.
    """

    def __init__(
        self,
        step: BalancedStep,
        *,
        settings: Settings,
        coords: RankCoords,
        cp_groups: CpGroups | None,
        args: Namespace | None,
        model: Any,
        timed: Callable[[int | None], AbstractContextManager[Any]],
    ) -> None:
        self.timed = timed
        self.token_weights: Callable[[], Tensor] | None = None
        self._step, self._sizes, self._topology, self._args = step, step.sizes, settings.topology, args
        self.cp_groups, self._tp_rank, self._model = cp_groups, coords.tp, model
        self._number: int | None = None
        self._is_read = False
        # A script for padded rows names only some of its ranks starts of sequences, and counts FLOPs by them.
        self._hidden_keys = DERIVED_KEYS if settings.unpad is not None else ()
        self._masks: list[Tensor] = []
        trees = self._sizes.trees()
        self._params: list[Any] = []
        self._sharing: PrefixSharing | None = None
        if settings.counts_router_tokens:
            self._masks = _router_masks(self._sizes, topology=settings.topology, coords=coords, trees=trees)
        if settings.unpad is not None or settings.overlaps_experts or settings.share_prefixes:
            starts = pack(self._sizes, settings=settings)
            self._params = [packed_seq_params(microbatch) for microbatch in starts]
        if trees:
            shard = (coords.tp, settings.topology.tp_size) if settings.topology.sequence_parallel else (0, 1)
            self._sharing = PrefixSharing(model, trees=trees, params=self._params, shard=shard)

    def __next__(self) -> Microbatch:
        """The micro-batch whose forward pass runs; no other fits its shape."""
        if self._number is None or self._is_read:
            raise BalanceError(
                "A micro-batch is read outside of Megatron's forward_step, which numbers them, or as the second one in "
                "a call of it; each has a size of its own: read one in a call, and none ahead, run Megatron's own "
                "schedules, or train without balance flags."
            )
        if not self._step.microbatches:  # this rank needs no data
            raise StopIteration
        self._is_read = True
        microbatch = self._step.microbatches[self._number]
        return {key: value for key, value in microbatch.items() if key not in self._hidden_keys}

    @property
    def num_tokens(self) -> int:
        """Tokens of the micro-batch that runs forward, over its context-parallel ranks; 0 where none does."""
        return 0 if self._number is None else self._sizes.num_tokens[self._number]

    @property
    def packed_params(self) -> Any:
        """PackedSeqParams of the micro-batch that runs forward, None where its script names starts of sequences."""
        return self._params[self._number] if self._params and self._number is not None else None

    def forward_step(
        self,
        forward_step: Callable[..., Any],
        forward_step_func: Callable[..., Any],
        data_iterator: Any,
        model: Any,
        *positional: Any,
        current_microbatch: int | None = None,
        **keywords: Any,
    ) -> Any:
        """Call `forward_step` of Megatron's schedules, which number micro-batches, with all switched for this one.

        Where it combines the forward pass of one with the backward pass of another, the last has no forward pass.
        """
        if model is None or current_microbatch is None:
            return forward_step(forward_step_func, data_iterator, model, *positional, **keywords)
        number, cp_size = current_microbatch, self._sizes.cp_sizes[current_microbatch]
        # Tensor-parallel ranks allocate receive buffers by these, and MoE layers view activations by them.
        shape = {"seq_length": self._sizes.num_tokens[number], "micro_batch_size": 1, "context_parallel_size": cp_size}
        weights = None
        if self._sizes.loss_weights is not None:
            weights = functools.cache(functools.partial(token_weights, self._sizes, number, topology=self._topology))
            forward_step_func = with_weighted_loss(forward_step_func, weights)
        with contextlib.ExitStack() as stack:
            stack.enter_context(patched_attrs(self, _number=number, _is_read=False, token_weights=weights))
            if self._args is not None:
                stack.enter_context(patched_attrs(self._args, **shape))
            if self.cp_groups is not None:
                stack.enter_context(self.cp_groups.in_parallel_state(cp_size))
            if self._masks or self._params or self.cp_groups is not None:
                stack.enter_context(self._model_keywords(number, model=model))
            if self._sharing is not None:
                stack.enter_context(self._sharing.counted(self._params[number], model))
            stack.enter_context(self.timed(number))
            return forward_step(
                forward_step_func, data_iterator, model, *positional, current_microbatch=number, **keywords
            )

    @contextlib.contextmanager
    def modules(self) -> Iterator[None]:
        """The modules of the model in this step: on shared prefixes, with router losses scaled, where it has these.

        Pipeline stages ask one another for the shape of every message, which `validate_args` forces off.
        """
        from megatron.core.utils import get_model_config

        totals = self._step.totals
        with contextlib.ExitStack() as stack:
            for chunk in self._model if isinstance(self._model, list) else [self._model]:
                stack.enter_context(patched_attrs(get_model_config(chunk), variable_seq_lengths=True))
            if self._sizes.loss_weights is not None:
                stack.enter_context(router_loss_scale(totals.learned, num_tokens=totals.tokens, model=self._model))
            if self._sharing is not None:
                stack.enter_context(self._sharing.installed())
            yield

    @contextlib.contextmanager
    def _model_keywords(self, number: int, *, model: Any) -> Iterator[None]:
        """Call the model with a mask, packed sequences, and the context-parallel group of a micro-batch."""
        from megatron.core.models.gpt.gpt_model import GPTModel
        from megatron.core.utils import unwrap_model

        inner: Any = unwrap_model(model)  # without the wrappers for data parallelism and precision
        added: dict[str, Any] = {}
        if self._masks:
            mask = self._masks[number]
            # GPTModel splits a mask itself, and on the first pipeline stage only.
            splits = isinstance(inner, GPTModel) and bool(inner.pre_process)
            if self._topology.sequence_parallel and not splits:
                mask = mask.chunk(self._topology.tp_size, dim=1)[self._tp_rank]
            added["padding_mask"] = mask
        if self._params:
            added["packed_seq_params"] = self._params[number]
        groups, cp_size = self.cp_groups, self._sizes.cp_sizes[number]

        def add(module: Any, positional: Any, keywords: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
            keywords = keywords | added
            if groups is not None:
                groups.stamp(keywords.get("packed_seq_params"), size=cp_size, model=module)
            return positional, keywords

        handle = inner.register_forward_pre_hook(add, with_kwargs=True)
        try:
            yield
        finally:
            handle.remove()


def _router_masks(
    sizes: MicrobatchSizes, *, topology: Topology, coords: RankCoords, trees: list[PrefixTree]
) -> list[Tensor]:
    """True where a token of this context-parallel rank is padding: `[1, t]` a micro-batch, in one copy to the GPU."""
    dp_cp_rank = coords.dp * topology.cp_size + coords.cp
    if trees:
        masks = [tree.multiplicity == 0 for tree in trees]
    else:
        columns = zip(sizes.sequence_lengths, sizes.num_tokens, sizes.cp_sizes, strict=True)
        masks = [
            padding_mask(
                lengths,
                num_tokens=num_tokens,
                token_multiple=topology.with_cp_size(size).token_multiple,
                cp_size=size,
                cp_rank=dp_cp_rank % size,
            )
            for lengths, num_tokens, size in columns
        ]
    whole = torch.from_numpy(np.concatenate(masks)).pin_memory().cuda(non_blocking=True)
    return list(whole.unsqueeze(0).split([mask.size for mask in masks], dim=1))


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


LoggedLoss = Callable[[Any, dict[str, Any]], tuple[Any, dict[str, Any]]]
"""Maps a loss that a router records, and the groups of ranks that it names, to those of the static group."""


class CpGroups:
    """Switches this rank between context-parallel groups, of which every rank of the world makes all.

    `by_size` lacks the sizes that this rank is in no whole group of. MoE routers with a loss of their own
    (`for_routers`) sum over the same groups with all their tensor-parallel ranks. `mean_weight` undoes that a mean over
    all ranks counts the newest micro-batch once for each of its own.
    """

    def __init__(self, topology: Topology, *, layout: Layout, timeout: timedelta, for_routers: bool) -> None:
        from megatron.core import packed_seq_params, parallel_state

        # Attention of Megatron's dev branch asserts a group, and leaves one of a single rank alone.
        self._names_every_group = hasattr(packed_seq_params, "resolve_cp_group")

        def groups(static: Any, *, over_tensor_ranks: bool) -> dict[int, dist.ProcessGroup]:
            by_size = {topology.cp_size: static}
            for size in topology.dynamic_cp_sizes:

                def key(coords: RankCoords, size: int = size) -> Hashable | None:
                    block = (coords.dp * topology.cp_size + coords.cp) // size
                    dp_cp_group = coords.pp, None if over_tensor_ranks else coords.tp
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
        self.mean_weight = 1.0
        self.logged_loss: LoggedLoss = lambda value, groups: (value, groups)
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

    def group_of(self, packed_seq_params: Any) -> dist.ProcessGroup | None:
        """The group that these params name, where it is not that of all modules."""
        size = getattr(packed_seq_params, "local_cp_size", None)
        return None if size in (None, self._static_size) else self.by_size[size]

    @contextlib.contextmanager
    def router_group(self, layer: Any, cp_group: dist.ProcessGroup) -> Iterator[None]:
        """Sum the router losses of a transformer layer, if it has any, over the ranks of this group."""
        router = getattr(getattr(layer, "mlp", None), "router", None)
        if router is None or not self._router_groups:
            yield
            return
        stock, group = router.tp_cp_group, self._router_groups[cp_group.size()]

        def logged_loss(value: Any, groups: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
            if groups.get("reduce_group") is group:
                groups = groups | {"reduce_group": stock}
            # A mean over all ranks counts a micro-batch once for each rank of its group.
            weight = 1.0 if groups.get("avg_group") is None else self._static_size / cp_group.size()
            return value * weight, groups

        with patched_attrs(router, tp_cp_group=group), patched_attrs(self, logged_loss=logged_loss):
            yield

    def in_parallel_state(self, size: int) -> AbstractContextManager[None]:
        """Have scripts find the group of this size in Megatron's parallel state."""
        from megatron.core import parallel_state

        group = self.by_size[size]
        ranks = dist.get_process_group_ranks(group)
        return patched_attrs(parallel_state, _CONTEXT_PARALLEL_GROUP=group, _CONTEXT_PARALLEL_GLOBAL_RANKS=ranks)

    def attention_group(self, size: int) -> dist.ProcessGroup | None:
        """The group for attention kernels; None for one rank, where releases would exchange keys with nobody."""
        return None if size == 1 and not self._names_every_group else self.by_size[size]

    def stamp(self, params: Any, *, size: int, model: Any) -> None:
        """Name the group of a micro-batch in its PackedSeqParams, which attention also reads in recomputation."""
        if params is None:
            raise BalanceError(
                f"{type(model).__name__} was called without packed_seq_params, which carry the context-parallel size "
                "of a micro-batch: pass them by keyword, or train without --balance-dynamic-cp."
            )
        params.cp_group, params.local_cp_size = self.attention_group(size), size
        self.mean_weight = self._static_size / size


def _engine_class() -> Any:
    """Megatron's attention over Transformer Engine, None without it."""
    try:
        from megatron.core.extensions.transformer_engine import HAVE_TE, TEDotProductAttention
    except ImportError:
        return None
    return TEDotProductAttention if HAVE_TE else None
