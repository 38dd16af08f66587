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
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron_balance.errors import BalanceError
from megatron_balance.hooking import patched_attrs
from megatron_balance.samples.sample import Samples

MICROBATCH, SAMPLE = "micro-batch", "sample"


def loss_values(samples: Samples, *, item_counts: Sequence[int], weighting: str) -> NDArray[np.int64]:
    """Learned tokens of each sample, and its unit on this rank or the bits of its weight: `[num_samples, 2]`.

    `item_counts` are the samples of each item that was loaded.
    """
    kinds = {key.name: key.kind for key in samples.schema.keys} if samples.schema is not None else {}
    if kinds and kinds.get("loss_mask") != "per_token":
        raise BalanceError("--balance-loss-weighting counts tokens by loss_mask, which the data does not have.")
    counts = [int(mask.sum()) for mask in samples.columns.get("loss_mask", ())]
    units = np.repeat(np.arange(len(item_counts)), item_counts)
    if weighting == SAMPLE:
        units = np.arange(len(samples))
    elif weighting != MICROBATCH and kinds:
        if kinds.get(weighting) != "per_sample" or any(value.numel() != 1 for value in samples.columns[weighting]):
            raise BalanceError(
                f"--balance-loss-weighting is {weighting!r}: it must be token, micro-batch, sample, or a key of the "
                "data with one number a row or a sequence."
            )
        column = np.array([value.item() for value in samples.columns[weighting]])
        units = column.astype(np.float64).view(np.int64) if column.dtype.kind == "f" else column.astype(np.int64)
    return np.stack([np.array(counts, dtype=np.int64), units], axis=1)


def loss_weights(
    values: NDArray[np.int64], *, home_ranks: NDArray[np.int64], weighting: str, num_microbatches: int, is_float: bool
) -> NDArray[np.float64]:
    """The weight of every sample of a step, from the values of all ranks; `num_microbatches` of all were loaded."""
    num_tokens, units = values.T
    if is_float:
        return np.ascontiguousarray(units).view(np.float64)
    keys = np.stack([home_ranks if weighting in (MICROBATCH, SAMPLE) else np.zeros_like(units), units])
    unit_of = np.unique(keys, axis=1, return_inverse=True)[1].reshape(-1)
    num_units = num_microbatches if weighting == MICROBATCH else int(unit_of.max(initial=-1)) + 1
    unit_tokens = np.bincount(unit_of, weights=num_tokens, minlength=1)[unit_of]
    return num_tokens.sum() / (np.maximum(unit_tokens, 1) * max(num_units, 1))


def token_weights(
    weights: Sequence[float], *, lengths: Sequence[int], num_tokens: int, token_multiple: int, cp_size: int
) -> Tensor:
    """Weights of the tokens of a micro-batch on each of its context-parallel ranks, 0 for filler."""
    # Each rank holds two chunks of every padded sequence, or the whole one.
    widths = -(-np.array(lengths, dtype=np.int64) // token_multiple) * token_multiple // cp_size
    values = np.zeros(num_tokens // cp_size, dtype=np.float32)
    values[: widths.sum()] = np.repeat(weights, widths)
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


def with_weights(loss_func: Callable[..., Any], weights: Callable[[], Tensor]) -> Callable[..., Any]:
    """A loss function of Megatron's schedules, on losses whose gradients are weighed."""

    @functools.wraps(loss_func)
    def weighted(output: Any, *positional: Any, **keywords: Any) -> Any:
        results = loss_func(weigh(output, weights()), *positional, **keywords)
        if not keywords and len(results) != 3:
            raise BalanceError(
                f"The loss function returns {len(results)} results, and --balance-loss-weighting needs three: the sum "
                "of losses, the number of tokens, and what is logged."
            )
        return results

    return weighted


@contextlib.contextmanager
def router_loss_scale(num_learned: int, *, num_tokens: int, model: Any) -> Iterator[None]:
    """Scale losses of routers by learned over all tokens in this context: Megatron counts all, and divides by those."""
    from megatron.core.utils import get_model_config

    with contextlib.ExitStack() as stack:
        for chunk in model if isinstance(model, list) else [model]:
            config: Any = get_model_config(chunk)
            stock = getattr(config, "moe_grad_scale_func", None) or config.grad_scale_func

            def scale(stock: Any = stock, takes_loss: bool = stock is config.grad_scale_func) -> Tensor:
                one = torch.tensor(1.0)  # without dimensions it goes with a scale on any device
                value = one if stock is None else stock(one) if takes_loss else stock()
                return value * (num_learned / max(num_tokens, 1))

            stack.enter_context(patched_attrs(config, moe_grad_scale_func=scale))
        yield
