"""Runs Megatron's modules on micro-batches in which samples share their beginnings.

PackedSeqParams name one sequence of all tokens, and carry the tree of the samples to every layer, also when its
activations are recomputed. What a module does otherwise for a token follows from the token's place in its samples:

    rotary embeddings   angles of its position, row by row
    core attention      attends over the tree; the layers that did are counted, as one that ignores the tree would let
                        samples attend to others and say nothing
    routers of experts  a padding mask of `~n` for a token of n samples: Megatron counts by the mask's complement, so
                        that the token is in its losses and in the expert bias n times

Invariants: modules are as before once the step has ended, also when it fails.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_balance.errors import BalanceError
from megatron_balance.mcore.tree_attention import Attention, attention_over
from megatron_balance.samples.prefix_packing import PrefixTree


class DeviceTree(NamedTuple):
    """A micro-batch on the device: its attention, `[num_tokens]` positions, and the mask for routers."""

    attend: Attention
    positions: Tensor
    router_mask: Tensor  # [tokens of this sequence-parallel rank, 1]


class PrefixSharing:
    """The modules of a model in one step. `params` are the PackedSeqParams of its micro-batches, which get their trees.

    A sequence-parallel rank is number `shard[0]` of `shard[1]`.
    """

    def __init__(
        self, model: Any, *, trees: Sequence[PrefixTree], params: Sequence[Any], shard: tuple[int, int]
    ) -> None:
        self._chunks = model if isinstance(model, list) else [model]
        self._num_calls = 0
        self._current: DeviceTree | None = None  # of the layer that runs, forward or again
        for tree, of_microbatch in zip(trees, params, strict=True):
            multiplicity = torch.from_numpy(tree.multiplicity).chunk(shard[1])[shard[0]].unsqueeze(1)
            positions = torch.from_numpy(tree.positions).cuda(non_blocking=True)
            of_microbatch.tree = DeviceTree(
                attention_over(tree, device=positions.device), positions, ~multiplicity.to(positions.device)
            )

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Have the modules of all chunks run on trees in this context."""
        with contextlib.ExitStack() as stack:
            for module in (module for chunk in self._chunks for module in chunk.modules()):
                if _attends(module):
                    handle = module.register_forward_pre_hook(self._enter_layer, with_kwargs=True)
                    stack.callback(handle.remove)
                if hasattr(module, "core_attention"):
                    # Latent attention has a scale of its own; the other is that of the configuration.
                    scale = getattr(module, "softmax_scale", module.config.softmax_scale)
                    module.core_attention.forward = functools.partial(self._attend, scale=scale)
                    stack.callback(delattr, module.core_attention, "forward")
                if hasattr(module, "rotary_pos_emb"):
                    stack.callback(module.rotary_pos_emb.register_forward_hook(self._angles).remove)
                if hasattr(module, "router"):
                    stack.callback(module.router.register_forward_pre_hook(self._count).remove)
            yield

    @contextlib.contextmanager
    def counted(self, params: Any, chunk: Any) -> Iterator[None]:
        """The forward pass of a chunk, every layer of which must attend over the tree."""
        self._current, self._num_calls = params.tree, 0
        yield
        num_layers = sum(map(_attends, chunk.modules()))
        if self._num_calls != num_layers:
            raise BalanceError(
                f"--balance-share-prefixes: {self._num_calls} of {num_layers} layers attended over shared prefixes; "
                "the others would let samples see one another. Train this model without the flag."
            )

    def _enter_layer(self, _layer: Any, _positional: Any, keywords: dict[str, Any]) -> None:
        self._current = getattr(keywords.get("packed_seq_params"), "tree", None)

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, *_: Any, packed_seq_params: Any, scale: float | None, **__: Any
    ) -> Tensor:
        self._num_calls += 1
        tree = getattr(packed_seq_params, "tree", None)
        if tree is None:
            raise BalanceError(
                "--balance-share-prefixes: a layer gives its attention other packed sequences than it got, which would "
                "let samples see one another. Train this model without the flag."
            )
        return tree.attend(query, key, value, scale=scale).flatten(1)

    def _angles(self, _rotary: Any, _inputs: Any, table: Any) -> Any:
        """The table is of positions; one of as many rows as tokens is taken row by row."""
        assert self._current is not None, "layers are entered with a tree"
        if isinstance(table, tuple):  # with YaRN's factor
            return table[0].index_select(0, self._current.positions), *table[1:]
        return table.index_select(0, self._current.positions)

    def _count(self, _router: Any, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        if len(inputs) < 2 or inputs[1] is None:
            return inputs
        assert self._current is not None, "layers are entered with a tree"
        return inputs[0], self._current.router_mask, *inputs[2:]


def _attends(module: Any) -> bool:
    """True for a layer with attention, or what takes its place."""
    from megatron.core.transformer.identity_op import IdentityOp

    attention = getattr(module, "self_attention", None)
    return attention is not None and not isinstance(attention, IdentityOp)
