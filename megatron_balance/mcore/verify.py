"""The check of a run's first step (`--balance-verify`): what Megatron's own schedule makes of the items as loaded.

Losses and gradients are computed three times, without an optimizer step: by that schedule; so once more, with what each
layer returns moved by half a unit in the last place, which shows how far rounding goes in this model; and balanced.
Losses that depend on the samples that share a micro-batch (of routers, of multi-token prediction) are left out; the
step itself follows, and has them.

Invariants: every rank of the world comes to the same verdict; gradients, buffers and random state are afterwards those
of a run without the check.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_balance.errors import BalanceError
from megatron_balance.hooking import patched_attrs
from megatron_balance.runtime.log import log_info
from megatron_balance.topology import Topology

Schedule = Callable[..., Any]

SPREAD = 6
"""Of what rounding changes in micro-batches and parameters, none of which makes up for another: two such changes differ
by up to 2.5 times in mixtures of experts, where a token takes another route."""


def allowances(precision: torch.dtype) -> tuple[float, float]:
    """Relative differences of loss and gradient norm that a number format explains in a small model.

    In fp32 another order moves a sum by a few units in the last place: 16 are allowed, a fifth of an error of 1e-5. In
    bf16 and fp16 a token's loss is rounded to half a unit, independently of other tokens', and the loss is a mean over
    some 4096 of them; the gradient norm, a root of few large sums, gets a quarter of a unit.
    """
    ulp = torch.finfo(precision).eps
    return (16 * ulp, 16 * ulp) if precision == torch.float32 else (ulp / 2 / 4096**0.5, ulp / 4)


def verify_step(
    schedule: Schedule, balanced: Schedule, arguments: dict[str, Any], *, items: list[Any] | None, topology: Topology
) -> None:
    """Compare a step that is balanced with Megatron's schedule on its `items`, None where this rank loads none.

    A BalanceError is raised on every rank where they differ by more than rounding.
    """
    from megatron.core.utils import get_model_config

    model, iterators = arguments["model"], arguments["data_iterator"]
    chunks = model if isinstance(model, list) else [model]
    config: Any = get_model_config(chunks[0])
    if not hasattr(chunks[0], "zero_grad_buffer") or config.finalize_model_grads_func is None:
        raise BalanceError(
            "--balance-verify reads reduced gradients: wrap the model in Megatron's DistributedDataParallel and set "
            "finalize_model_grads_func, or drop the flag."
        )

    def stock(**changed: Any) -> Any:
        if items is not None:  # every chunk of a virtual pipeline reads the same rows
            changed["data_iterator"] = [iter(items) for _ in iterators] if isinstance(iterators, list) else iter(items)
        return schedule(**changed)

    precision = torch.bfloat16 if config.bf16 else torch.float16 if config.fp16 else torch.float32
    stock_losses, stock_norms = _computed(stock, arguments, chunks=chunks)
    with _rounded(chunks, ulp=torch.finfo(precision).eps):
        rounded_losses, rounded_norms = _computed(stock, arguments, chunks=chunks)
    losses, norms = _computed(balanced, arguments, chunks=chunks)
    # Tensor-parallel ranks have the same losses, data-parallel ranks the same gradients.
    of_losses = [*stock_losses.sum(0), *losses.sum(0), (rounded_losses - stock_losses)[:, 0].abs().sum()]
    of_norms = [part.square().sum() for part in (stock_norms, norms, norms - stock_norms, rounded_norms - stock_norms)]
    sums = torch.cat([torch.stack(of_losses) / topology.tp_size, torch.stack(of_norms) / topology.dp_cp_size])
    dist.all_reduce(sums)
    loss, tokens, our_loss, our_tokens, loss_spread = sums[: len(of_losses)].tolist()
    norm, our_norm, norm_difference, norm_spread = sums[len(of_losses) :].sqrt().tolist()
    loss, our_loss, loss_spread = loss / max(tokens, 1), our_loss / max(our_tokens, 1), loss_spread / max(tokens, 1)
    of_loss, of_norm = allowances(precision)
    texts, differs = [], False
    for name, by_stock, ours, difference, allowed in (
        ("learned tokens", tokens, our_tokens, our_tokens - tokens, 0.0),
        ("loss", loss, our_loss, our_loss - loss, max(of_loss * abs(loss), SPREAD * loss_spread)),
        ("gradient norms", norm, our_norm, norm_difference, max(of_norm * norm, SPREAD * norm_spread)),
    ):
        texts.append(f"{name} {by_stock:.7g} by stock, {ours:.7g} balanced ({abs(difference):.1e} of {allowed:.1e})")
        # Under a loss scale that is still too large, fp16 overflows.
        compares = math.isfinite(by_stock + ours if precision == torch.float16 else by_stock)
        differs |= compares and not abs(difference) <= allowed
    text = f"{', '.join(texts)}: the difference, of norms by parameter, and what rounding in {precision} allows."
    if differs:
        raise BalanceError(
            f"--balance-verify: the first step differs from stock: {text} No weight has changed: train without balance "
            "flags, and report this with the output of megatron-balance doctor -- FLAGS."
        )
    log_info(f"--balance-verify: the first step equals stock: {text}")


def _computed(schedule: Schedule, arguments: dict[str, Any], *, chunks: Sequence[Any]) -> tuple[Tensor, Tensor]:
    """Of this rank the losses, `[num_microbatches, 2]` sums and learned tokens, and gradient norms of parameters."""
    with _apart(chunks):
        reports = schedule(**arguments | {"force_all_reduce": True})
        grads = [param.main_grad for chunk in chunks for param in chunk.parameters() if param.requires_grad]
        norms = [torch.linalg.vector_norm(grad, dtype=torch.float32) for grad in grads]
    values = [value for report in reports if isinstance(report, dict) for value in report.values()]
    nothing = torch.zeros(2, dtype=torch.float64, device=next(chunks[0].parameters()).device)
    # A mean over a micro-batch depends on the samples that share it.
    losses = [value.to(nothing).reshape(2) for value in values if isinstance(value, Tensor) and value.numel() == 2]
    return torch.stack([nothing, *losses]), torch.stack([nothing[0], *norms]).double()


@contextlib.contextmanager
def _apart(chunks: Sequence[Any]) -> Iterator[None]:
    """A step beside training: without losses that depend on micro-batches, and what it changes is put back."""
    from megatron.core.tensor_parallel.random import _fork_rng
    from megatron.core.transformer.moe.router import TopKRouter
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper
    from megatron.core.utils import get_model_config, unwrap_model

    without: dict[str, Any] = {
        "get_aux_loss_coeff": lambda *_: 0.0,
        "apply_z_loss": lambda _, logits, *__, **___: logits,
    }
    models: Any = unwrap_model([*chunks])
    buffers = [(buffer, buffer.clone()) for model in models for buffer in model.buffers()]
    with contextlib.ExitStack() as stack:
        stack.enter_context(_fork_rng())
        stack.enter_context(patched_attrs(TopKRouter, **without))
        stack.enter_context(patched_attrs(MTPLossLoggingHelper, tracker={}))
        for chunk in chunks:
            config = get_model_config(chunk)  # rows of a loader may differ in length too
            stack.enter_context(patched_attrs(config, mtp_loss_scaling_factor=0.0, variable_seq_lengths=True))
            stack.enter_context(patched_attrs(chunk, force_all_reduce=True))
        try:
            yield
        finally:
            for chunk in chunks:
                chunk.zero_grad_buffer()
            for buffer, before in buffers:
                buffer.data.copy_(before)


@contextlib.contextmanager
def _rounded(chunks: Sequence[Any], *, ulp: float) -> Iterator[None]:
    """Move every number that a layer returns by half a unit in the last place, up or down."""
    seeds = itertools.count()

    def move(_layer: Any, _inputs: Any, outputs: Any) -> None:
        tensor = outputs[0] if isinstance(outputs, tuple) else outputs
        generator = torch.Generator(tensor.device).manual_seed(next(seeds))
        up = torch.empty_like(tensor, dtype=torch.float32).bernoulli_(generator=generator)
        tensor.data.mul_(1 + ulp * (up - 0.5))  # autograd sees as little of it as of rounding

    lists = [module for chunk in chunks for module in chunk.modules() if isinstance(module, torch.nn.ModuleList)]
    with contextlib.ExitStack() as stack:
        for layer in itertools.chain(*lists):
            stack.callback(layer.register_forward_hook(move).remove)
        yield
