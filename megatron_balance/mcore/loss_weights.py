"""Weights of gradients for losses that are no mean over the tokens of a step (`--balance-loss-weighting`).

A balanced run has `calculate_per_token_loss`: gradients are sums over tokens, divided by N, the learned tokens of the
step. A token's gradient is multiplied by the weight of its sample: N / (n * U) in a unit of n learned tokens, of which
the step has U. So each unit's mean counts alike, and the weights of all learned tokens sum to N. A unit is a
micro-batch as it was loaded, a sample, or the samples of one id; a key of floats holds the weights themselves.

The loss itself, the count of tokens, the log and evaluation are as without weights: a weighted loss mask would be
rounded to whole tokens by Megatron's loss functions.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron_balance.errors import BalanceError
from megatron_balance.hooking import patched_attrs
from megatron_balance.runtime.gather import GatheredLengths
from megatron_balance.samples.prefix_packing import PrefixTree
from megatron_balance.samples.sample import Samples
from megatron_balance.topology import Topology

if TYPE_CHECKING:
    from megatron_balance.mcore.prepare import MicrobatchSizes

MICROBATCH, SAMPLE = "micro-batch", "sample"


def joined(parts: Sequence[Samples], *, weighting: str) -> Samples:
    """The samples of a step's items; their values are learned tokens, and the unit or the bits of a weight."""
    samples = Samples.joined(parts)
    kinds = {key.name: key.kind for key in samples.schema.keys} if samples.schema is not None else {}
    if kinds and kinds.get("loss_mask") != "per_token":
        raise BalanceError("--balance-loss-weighting counts tokens by loss_mask, which the data does not have.")
    counts = [int(mask.sum()) for mask in samples.columns.get("loss_mask", ())]
    units = np.arange(len(samples))
    if weighting == MICROBATCH:
        units = np.repeat(np.arange(len(parts)), [*map(len, parts)])
    elif weighting != SAMPLE and kinds:
        if kinds.get(weighting) != "per_sample" or any(value.numel() != 1 for value in samples.columns[weighting]):
            raise BalanceError(
                f"--balance-loss-weighting is {weighting!r}: it must be token, micro-batch, sample, or a key of the "
                "data with one number a row or a sequence."
            )
        column = np.array([value.item() for value in samples.columns[weighting]])
        units = column.astype(np.float64).view(np.int64) if column.dtype.kind == "f" else column.astype(np.int64)
    return replace(samples, values=np.stack([np.array(counts, dtype=np.int64), units], axis=1))


def loss_weights(
    gathered: GatheredLengths, *, weighting: str | None, num_microbatches: int
) -> NDArray[np.float64] | None:
    """The weight of every sample of a step, of which all ranks loaded `num_microbatches`; None where tokens count."""
    if weighting is None or gathered.schema is None:
        return None
    num_tokens, units = gathered.values[:, -2:].T
    if any(key.name == weighting and key.dtype.is_floating_point for key in gathered.schema.keys):
        return np.ascontiguousarray(units).view(np.float64)
    ranks = gathered.home_ranks if weighting in (MICROBATCH, SAMPLE) else np.zeros_like(units)
    unit_of = np.unique(np.stack([ranks, units]), axis=1, return_inverse=True)[1].reshape(-1)
    num_units = num_microbatches if weighting == MICROBATCH else int(unit_of.max()) + 1
    unit_tokens = np.bincount(unit_of, weights=num_tokens)[unit_of]
    return num_tokens.sum() / (np.maximum(unit_tokens, 1) * num_units)


def token_weights(sizes: MicrobatchSizes, number: int, *, topology: Topology) -> Tensor:
    """Weights of the tokens of a micro-batch on each of its context-parallel ranks, 0 for filler."""
    assert sizes.loss_weights is not None, "this step has weights"
    lengths, num_tokens = sizes.sequence_lengths[number], sizes.num_tokens[number]
    if sizes.shared is not None:
        tree, sums = PrefixTree.of(lengths, sizes.shared[number], num_tokens=num_tokens), np.zeros(num_tokens)
        for weight, path in zip(sizes.loss_weights[number], tree.paths, strict=True):
            sums[path] += weight
        means = sums / np.maximum(tree.multiplicity, 1)  # the loss mask has their number
        return torch.from_numpy(means.astype(np.float32))
    # Each rank holds two chunks of every padded sequence, or the whole one.
    cp_size = sizes.cp_sizes[number]
    multiple = topology.with_cp_size(cp_size).token_multiple
    widths = -(-np.array(lengths, dtype=np.int64) // multiple) * multiple // cp_size
    values = np.zeros(num_tokens // cp_size, dtype=np.float32)
    values[: widths.sum()] = np.repeat(sizes.loss_weights[number], widths)
    return torch.from_numpy(values)


class _Weigh(torch.autograd.Function):
    """The identity; its backward multiplies by weights."""

    @staticmethod
    def forward(ctx: Any, losses: Tensor, weights: Tensor) -> Tensor:
        ctx.save_for_backward(weights)
        return losses.view_as(losses)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (weights,) = ctx.saved_tensors
        return grad * weights.view_as(grad).to(grad.dtype), None


def weigh(losses: Any, weights: Tensor) -> Tensor:
    """The losses of tokens, whose gradients are multiplied by weights; another output raises BalanceError."""
    if not isinstance(losses, Tensor) or losses.numel() != weights.numel():
        shape = list(losses.shape) if isinstance(losses, Tensor) else type(losses).__name__
        raise BalanceError(
            f"--balance-loss-weighting weighs the loss of each of {weights.numel()} tokens, and the model's output is "
            f"{shape}: return the losses of tokens, or set --balance-loss-weighting token."
        )
    weights = weights.pin_memory() if losses.is_cuda else weights
    return _Weigh.apply(losses, weights.to(losses.device, non_blocking=True))  # pyright: ignore[reportReturnType]


def with_weighted_loss(forward_step_func: Callable[..., Any], weights: Callable[[], Tensor]) -> Callable[..., Any]:
    """A forward step of Megatron's schedules, whose loss function gets losses whose gradients are weighed."""

    def forward_step(*positional: Any, **keywords: Any) -> Any:
        output, loss_func = forward_step_func(*positional, **keywords)

        def weighted(output: Any, *positional: Any, **keywords: Any) -> Any:
            results = loss_func(weigh(output, weights()), *positional, **keywords)
            if not keywords and len(results) != 3:
                raise BalanceError(
                    f"The loss function returns {len(results)} results, and --balance-loss-weighting needs three: the "
                    "sum of losses, the number of tokens, and what is logged."
                )
            return results

        return output, loss_func and weighted

    return forward_step


@contextlib.contextmanager
def router_loss_scale(num_learned: int, *, num_tokens: int, model: Any) -> Iterator[None]:
    """Scale losses of routers by learned over all tokens in this context: Megatron counts all, and divides by those."""
    from megatron.core.utils import get_model_config

    with contextlib.ExitStack() as stack:
        for chunk in model if isinstance(model, list) else [model]:
            config: Any = get_model_config(chunk)
            stock = getattr(config, "moe_grad_scale_func", None) or config.grad_scale_func

            def scale(stock: Any = stock, takes_loss: bool = stock is config.grad_scale_func) -> Tensor:
                fraction = torch.tensor(num_learned / max(num_tokens, 1))  # 0-d: it goes with scales on any device
                scaled = fraction if stock is None else stock(fraction) if takes_loss else stock() * fraction
                return scaled.reshape(1)

            stack.enter_context(patched_attrs(config, moe_grad_scale_func=scale))
        yield
