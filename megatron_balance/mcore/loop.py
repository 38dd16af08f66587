"""Balanced steps for a hand-written training loop, on `megatron.core` alone: it needs no `megatron.training`."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

from megatron_balance.cost.model import CostModel
from megatron_balance.errors import BalanceError
from megatron_balance.hooking import is_off
from megatron_balance.mcore.hooks import core_hooks
from megatron_balance.mcore.prepare import BalancedStep
from megatron_balance.mcore.run import build_run, end_run, run_of
from megatron_balance.mcore.setup.flags import fill_in, parse_flags
from megatron_balance.mcore.setup.rules import autotuned
from megatron_balance.mcore.step import BalancedForwardBackward
from megatron_balance.model.shape import ModelShape

Schedule = Callable[..., Any]

_FLAGS = ("--use-dynamic-batch-size", "--balance-data", "--balance-cost", "flops")


def balanced_schedule(
    forward_backward_func: Schedule,
    *,
    model: Any,
    max_tokens_per_gpu: int,
    cost: CostModel | ModelShape | None = None,
    flags: Sequence[str] = (),
    num_steps: int | None = None,
    log_interval: int | None = None,
    timeout: timedelta = timedelta(minutes=10),
) -> Schedule:
    """A schedule that balances every training step, to be called in place of Megatron's.

    Every rank of the world calls it, once `parallel_state` is initialized and the model is built. Each call of the
    result pulls `num_microbatches` items from `data_iterator`, moves their samples between data-parallel ranks, and
    runs Megatron's schedule over packed micro-batches: dicts with the keys of the items, per-token ones
    `[1, num_tokens]`, `cu_seqlens` and `max_seqlen` (`packed_seq_params` reads them). The ranks of a model replica that
    pass an iterator pass the same items. The configuration needs `calculate_per_token_loss`: the loss function returns
    the sum of losses and the number of tokens, and `finalize_model_grads_func` divides by it.

    Args:
        forward_backward_func: of `get_forward_backward_func()`.
        model: Megatron's module, wrapped for data parallelism or not, or a list of chunks under a virtual pipeline.
        max_tokens_per_gpu: the largest number of tokens of a micro-batch on one GPU.
        cost: of a sample, or the model whose FLOPs count; by default those of `model`'s configuration.
        flags: further balance flags, such as `["--balance-record", "run"]`.
        num_steps: of the loop; without it, the step after the last one is prepared in vain.
        log_interval: steps between log lines with the figures of balancing; None for no lines.
        timeout: of this package's collectives.

    Returns:
        A `BalancedSchedule`; `forward_backward_func` itself where `flags` turn balancing off.

    Raises:
        BalanceError: on every rank: a setting that balancing does not go with, or ranks that differ.
    """
    run = run_of_model(
        model,
        flags=["--max-tokens-per-gpu", str(max_tokens_per_gpu), *flags],
        cost=cost,
        train_iters=num_steps,
        log_interval=log_interval,
        distributed_timeout_minutes=timeout / timedelta(minutes=1),
    )
    if run is None:
        return forward_backward_func
    return BalancedSchedule(forward_backward_func, run=run)


class BalancedSchedule:
    """Megatron's schedule with balanced micro-batches; `balanced_schedule` makes it."""

    def __init__(self, schedule: Schedule, *, run: BalancedForwardBackward) -> None:
        self._schedule, self._run = schedule, run

    @property
    def last_step(self) -> BalancedStep | None:
        """The data of the newest step on this rank."""
        return self._run.last_step

    def undo(self) -> None:
        """End the run's threads, processes and groups, and unhook `megatron.core`, once training is over.

        Every rank calls it after the same step. Hooks that `install` put in place stay.
        """
        end_run()

    def __call__(self, **arguments: Any) -> Any:
        """Run one step, or an evaluation (`forward_only`). Arguments and result are those of Megatron's schedule."""
        run_of(self, lambda: self._run)  # for hooks
        return self._run(self._schedule, **arguments)


def run_of_model(
    model: Any,
    *,
    flags: Sequence[str],
    cost: CostModel | ModelShape | None,
    eval_iters: int = 0,
    lora_rank: int = 0,
    num_steps_done: Callable[[], int] | None = None,
    **options: Any,
) -> BalancedForwardBackward | None:
    """The balanced run of a loop that parses no Megatron arguments but has `options`; None where it stays stock."""
    if is_off("Megatron Core"):
        return None
    from megatron.core import parallel_state
    from megatron.core.utils import get_model_config, unwrap_model

    if not parallel_state.model_parallel_is_initialized():
        raise BalanceError(
            "Megatron's parallel state is not initialized: call parallel_state.initialize_model_parallel() first."
        )
    chunks = model if isinstance(model, list) else [model]
    config, inner = get_model_config(chunks[0]), unwrap_model(chunks[0])
    parsed, _ = parse_flags([*_FLAGS, *flags])
    vocab_size = getattr(inner, "vocab_size", None)
    if hasattr(inner, "language_model"):
        raise BalanceError(
            f"{type(inner).__name__} has an encoder beside its language model, and this package packs no images into "
            "its forward step: train it without balancing."
        )
    if (
        (parsed.balance_cost == "flops" or "costs" in autotuned(vars(parsed))[1])
        and cost is None
        and vocab_size is None
    ):
        raise BalanceError(
            f"{type(inner).__name__} has no vocab_size, so that its FLOPs are not known: give cost (a ModelShape or a "
            "CostModel), or the flag --balance-cost tokens."
        )
    options = {"eval_iters": eval_iters, **options}
    all_options = ChainMap(vars(parsed), options, _options_of_modules(chunks), vars(config))
    fill_in(parsed, options=all_options)

    def shape() -> ModelShape:
        if isinstance(cost, ModelShape):
            return cost
        pattern = all_options["hybrid_layer_pattern"] or ""
        read_shape = ModelShape.from_transformer_config
        return replace(
            read_shape(config, padded_vocab_size=vocab_size or 0, hybrid_layer_pattern=pattern), lora_rank=lora_rank
        )

    return build_run(
        all_options,
        shape=shape,
        hooks=core_hooks,
        cost=cost if isinstance(cost, CostModel) else None,
        num_steps_done=num_steps_done,
    )


def _options_of_modules(chunks: Sequence[Any]) -> dict[str, Any]:
    """Megatron's options that are not in a TransformerConfig, as the modules and the parallel state have them."""
    from megatron.core import parallel_state
    from megatron.core.utils import get_model_config, unwrap_model

    inner: Any = unwrap_model(chunks[0])
    kinds = ("data", "context", "tensor_model", "pipeline_model", "expert_model", "expert_tensor")
    # A configuration may leave sizes at 1: layers ask the parallel state.
    sizes = {f"{kind}_parallel_size": getattr(parallel_state, f"get_{kind}_parallel_world_size")() for kind in kinds}
    wrapper, modules = type(chunks[0]).__name__, [*map(type, inner.modules())]
    ddp_config = getattr(chunks[0], "ddp_config", None)
    layers = "transformer_engine" if any("transformer_engine" in module.__module__ for module in modules) else None
    if layers is None and any(module.__name__ == "DotProductAttention" for module in modules):
        layers = "local"
    return {
        **sizes,
        "virtual_pipeline_model_parallel_size": len(chunks) if len(chunks) > 1 else None,
        "num_experts": get_model_config(chunks[0]).num_moe_experts or 0,
        "create_attention_mask_in_dataloader": False,  # of scripts; dev's configuration sets it
        "transformer_impl": layers,
        "use_megatron_fsdp": wrapper == "FullyShardedDataParallel",
        "use_torch_fsdp2": wrapper == "TorchFullyShardedDataParallel",
        "data_parallel_sharding_strategy": getattr(ddp_config, "data_parallel_sharding_strategy", None),
        "hybrid_layer_pattern": getattr(inner, "hybrid_layer_pattern", None)
        or getattr(inner, "hybrid_override_pattern", None),
        "position_embedding_type": getattr(inner, "position_embedding_type", None),
        "seq_length": getattr(inner, "max_sequence_length", 0),
    }
