"""Attention over a tree of samples that begin alike: a causal call for all nodes and a rectangle for each depth.

The queries below a node attend to its keys in one packed call, without a copy of keys for each sample. Calls are
merged by their log-sum-exp. In the backward pass every call gets the merged output and log-sum-exp of its queries, as
in ring attention: with p = exp(s - lse), dS = p * (dP - sum(dO * O)) needs nothing else of the other calls. Gradients
are summed in fp32. The public functions of FlashAttention drop the gradient of the log-sum-exp: none of them is used.

Shapes: t tokens, n heads and g query groups of this tensor-parallel rank, d channels a head.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from megatron_balance.errors import BalanceError
from megatron_balance.runtime.process import device_kind, version_of
from megatron_balance.samples.prefix_packing import PrefixTree

HEAD_MULTIPLE = 8
"""Of which kernels take channels of a head."""

Inputs = tuple[Tensor, Tensor, Tensor]
"""Queries `[t, n, d]`, keys and values `[t, g, d]`."""


class Call(NamedTuple):
    """Packed sequences of queries and keys that attend to one another: those of all tokens, each causally, or these."""

    bounds: tuple[Tensor, Tensor, int, int]  # where sequences of queries and of keys begin, and their longest ones
    queries: Tensor | None = None
    keys: Tensor | None = None

    @property
    def is_causal(self) -> bool:
        """True for the call of all nodes, each with itself."""
        return self.queries is None


def calls_of(tree: PrefixTree, *, device: torch.device | str) -> list[Call]:
    """The calls of a micro-batch, on the device."""

    def on_device(values: Any, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.from_numpy(values).to(device=device, dtype=dtype, non_blocking=True)

    def bounds(*starts: Any) -> Any:
        return *(on_device(x, torch.int32) for x in starts), *(int(np.diff(x).max()) for x in starts)

    below = [
        Call(bounds(query_starts, key_starts), on_device(queries), on_device(keys))
        for queries, keys, query_starts, key_starts in tree.rectangles()
    ]
    return [Call(bounds(tree.starts, tree.starts)), *below]


class Kernels(NamedTuple):
    """Attention to packed sequences that gives, and takes back, the log-sum-exp of its scores.

    `forward(inputs, call, scale)` returns the output, the log-sum-exp `[n, t]`, and what
    `backward(grad, inputs, out, lse, call, scale, state)` needs beside them, which returns the inputs' gradients.
    """

    forward: Callable[..., tuple[Tensor, Tensor, Any]]
    backward: Callable[..., Inputs]


def _torch_forward(inputs: Inputs, call: Call, scale: float) -> tuple[Tensor, Tensor, Any]:
    attend = torch.ops.aten._flash_attention_forward
    out, lse, *state, _ = attend(*inputs, *call.bounds, 0.0, call.is_causal, False, scale=scale)
    return out, lse, state


def _torch_backward(
    grad: Tensor, inputs: Inputs, out: Tensor, lse: Tensor, call: Call, scale: float, state: Any
) -> Inputs:
    differentiate = torch.ops.aten._flash_attention_backward
    return differentiate(grad, *inputs, out, lse, *call.bounds, 0.0, call.is_causal, *state, scale=scale)


def _flash_forward(inputs: Inputs, call: Call, scale: float) -> tuple[Tensor, Tensor, Any]:
    from flash_attn.flash_attn_interface import _flash_attn_varlen_forward as attend  # pyright: ignore

    out, lse, _, state = attend(*inputs, *call.bounds, 0.0, scale, call.is_causal)
    return out, lse, state


def _flash_backward(
    grad: Tensor, inputs: Inputs, out: Tensor, lse: Tensor, call: Call, scale: float, state: Any
) -> Inputs:
    from flash_attn.flash_attn_interface import _flash_attn_varlen_backward as differentiate  # pyright: ignore

    query, key, value = map(torch.empty_like, inputs)
    options = (0.0, scale, call.is_causal, -1, -1, 0.0, None, torch.are_deterministic_algorithms_enabled())
    differentiate(grad, *inputs, out, lse, query, key, value, *call.bounds, *options, rng_state=state)
    return query, key, value


def _cpu_forward(inputs: Inputs, call: Call, scale: float) -> tuple[Tensor, Tensor, Any]:
    attend, (query, *keys) = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu, inputs
    parts = [attend(*sequence, 0.0, call.is_causal, scale=scale) for sequence in _sequences(call, [query], keys)]
    outs, sums = zip(*parts, strict=True)
    return torch.cat([out[0].transpose(0, 1) for out in outs]), torch.cat([lse[0] for lse in sums], dim=1), None


def _cpu_backward(
    grad: Tensor, inputs: Inputs, out: Tensor, lse: Tensor, call: Call, scale: float, state: Any
) -> Inputs:
    differentiate = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    (query, *keys), parts = inputs, list[Any]()
    for of_query, of_grad, of_out, sums, *sequence in _sequences(call, [query, grad, out, lse.t().unsqueeze(2)], keys):
        options = (of_out, sums[..., 0], 0.0, call.is_causal)
        parts.append(differentiate(of_grad, of_query, *sequence, *options, scale=scale))
    query, *keys = (torch.cat([x[0].transpose(0, 1) for x in column]) for column in zip(*parts, strict=True))
    key, value = (x.unflatten(1, (inputs[1].shape[1], -1)).sum(2) for x in keys)
    return query, key, value


def _sequences(call: Call, of_queries: list[Tensor], of_keys: list[Tensor]) -> Iterator[list[Tensor]]:
    """`[1, n, t, d]` of each sequence: the kernel of CPUs takes one, and as many groups as heads."""
    heads = of_queries[0].shape[1] // of_keys[0].shape[1]
    query_sizes, key_sizes = (starts.diff().tolist() for starts in call.bounds[:2])
    columns = [x.split(query_sizes) for x in of_queries]
    columns += [x.repeat_interleave(heads, dim=1).split(key_sizes) for x in of_keys]
    for sequence in zip(*columns, strict=True):
        yield [x.transpose(0, 1).unsqueeze(0) for x in sequence]


OF_TORCH = Kernels(_torch_forward, _torch_backward)
"""FlashAttention 2 as torch holds it; `torch.nn.attention.varlen` calls the same operators."""

OF_FLASH_ATTENTION = Kernels(_flash_forward, _flash_backward)
"""The package flash-attn, from 2.7 on."""

OF_CPU = Kernels(_cpu_forward, _cpu_backward)


def kernels() -> Kernels:
    """Those of what is installed; a BalanceError where none is."""
    if device_kind() == "cpu":
        return OF_CPU
    for package, oldest, of_package in (("torch", (2, 10), OF_TORCH), ("flash-attn", (2, 7), OF_FLASH_ATTENTION)):
        # The first releases that return the log-sum-exp of packed sequences as [n, t], from these functions.
        if tuple(map(int, re.findall(r"\d+", version_of(package) or "")[:2])) >= oldest:
            return of_package
    raise BalanceError(
        "--balance-share-prefixes is set, and no attention is installed whose backward pass takes a log-sum-exp: "
        "install torch 2.10 or newer, or flash-attn 2.7 or newer, or drop the flag."
    )


def tree_attention(
    query: Tensor, key: Tensor, value: Tensor, calls: list[Call], *, scale: float | None, backend: Kernels
) -> Tensor:
    """Each token attends to those before it in its samples: `[t, n, d]`, of keys and values `[t, g, d]`.

    Values may have other channels than queries and keys, which the result has then.
    """
    channels, value_channels = query.shape[2], value.shape[2]
    width = -(-max(channels, value_channels) // HEAD_MULTIPLE) * HEAD_MULTIPLE
    inputs = [x if x.shape[2] == width else pad(x, (0, width - x.shape[2])) for x in (query, key, value)]
    out: Any = _TreeAttention.apply(*inputs, calls, channels**-0.5 if scale is None else scale, backend)
    return out[..., :value_channels]


class _TreeAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, calls: list[Call], scale: float, backend: Kernels
    ) -> Tensor:
        out, lse, state = backend.forward((query, key, value), calls[0], scale)
        total, states = out.to(lse.dtype), [state]
        for call in calls[1:]:
            part, part_lse, state = backend.forward(
                (query[call.queries], key[call.keys], value[call.keys]), call, scale
            )
            before = lse[:, call.queries]
            merged = torch.logaddexp(before, part_lse)
            old, new = ((x - merged).exp().t().unsqueeze(2) for x in (before, part_lse))
            total[call.queries] = total[call.queries] * old + part * new
            lse[:, call.queries] = merged
            states.append(state)
        out = total.to(query.dtype)
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.calls, ctx.states, ctx.scale, ctx.backend = calls, states, scale, backend
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        query, key, value, out, lse = ctx.saved_tensors
        grad = grad.contiguous()
        first, *others = zip(ctx.calls, ctx.states, strict=True)
        grads = ctx.backend.backward(grad, (query, key, value), out, lse, first[0], ctx.scale, first[1])
        sums = [x.to(lse.dtype) for x in grads]
        for call, state in others:
            inputs = (query[call.queries], key[call.keys], value[call.keys])
            rows = (out[call.queries], lse[:, call.queries].contiguous())
            parts = ctx.backend.backward(grad[call.queries], inputs, *rows, call, ctx.scale, state)
            for total, part, places in zip(sums, parts, (call.queries, call.keys, call.keys), strict=True):
                total[places] += part
        return *(x.to(query.dtype) for x in sums), None, None, None
