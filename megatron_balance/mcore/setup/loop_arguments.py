"""The arguments of a hand-written training loop, read from its model and Megatron's parallel state.

`megatron_balance` reads a run's settings from Megatron's arguments. A loop on `megatron.core` alone has none: here they
are made from what the loop has built, so that the same checks, cost model and topology serve both.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from megatron_balance.cost.model import CostModel
from megatron_balance.errors import BalanceError
from megatron_balance.mcore.setup.command_line import parse_balance_flags
from megatron_balance.mcore.setup.one_flag import fill_in_flags
from megatron_balance.model.megatron_args import args_of_transformer_config
from megatron_balance.model.shape import ModelShape

_OWN_FLAGS = ("--use-dynamic-batch-size", "--balance-data", "--balance-by-flops")

_FSDP = ("FullyShardedDataParallel", "TorchFullyShardedDataParallel")


def args_of_loop(
    flags: Sequence[str],
    *,
    model: Any,
    max_tokens_per_gpu: int,
    cost: CostModel | ModelShape | None,
    num_steps: int | None,
    log_interval: int | None,
    timeout: timedelta,
    eval_iters: int = 0,
) -> Namespace:
    """Arguments as Megatron's parser would make them for a loop; those that this package reads.

    Args:
        flags: balance flags, after those that every loop has.
        model: Megatron's module, wrapped or not, or a list of its chunks.
        max_tokens_per_gpu: `--max-tokens-per-gpu`.
        cost: of a sample, or the model whose FLOPs count; None to read them from the model's configuration.
        num_steps: that the loop trains; None where that is not known.
        log_interval: steps between log lines, or None.
        timeout: of collectives.
        eval_iters: iterations of its evaluations; with none, forward-only calls stay Megatron's own.

    Raises:
        BalanceError: a flag is wrong or has no meaning here; the model's FLOPs or parallel state are not known.
    """
    from megatron.core import parallel_state
    from megatron.core.utils import get_model_config, unwrap_model

    if not parallel_state.model_parallel_is_initialized():
        raise BalanceError(
            "Megatron's parallel state is not initialized: call parallel_state.initialize_model_parallel() first."
        )
    chunks = model if isinstance(model, list) else [model]
    config, inner = get_model_config(chunks[0]), unwrap_model(chunks[0])
    parsed = parse_balance_flags([*_OWN_FLAGS, "--max-tokens-per-gpu", str(max_tokens_per_gpu), *flags])
    if parsed.balance_evaluation and not eval_iters:
        raise BalanceError(
            "--balance-evaluation is set in a hand-written loop: it balances evaluations of Megatron's own loop only; "
            "drop it, or train with megatron.training."
        )
    if hasattr(inner, "language_model"):
        raise BalanceError(
            f"{type(inner).__name__} has an encoder beside its language model, and this package packs no images into "
            "its forward step: train it without balancing."
        )
    vocab_size = getattr(inner, "vocab_size", None)
    args = args_of_transformer_config(config, padded_vocab_size=vocab_size)
    vars(args).update(vars(parsed))
    if args.balance_by_flops and cost is None and vocab_size is None:
        raise BalanceError(
            f"{type(inner).__name__} has no vocab_size, so that its FLOPs are not known: give cost (a ModelShape or a "
            "CostModel), or the flag --no-balance-by-flops."
        )
    vars(args).update(_parallel_sizes(parallel_state, num_chunks=len(chunks)))
    vars(args).update(_of_model(chunks[0], inner=inner))
    args.balance_cost_model = cost if isinstance(cost, CostModel) else None
    args.balance_shape = cost if isinstance(cost, ModelShape) else None
    args.balance_reads_on_every_rank = True
    args.train_iters, args.curr_iteration, args.iteration = num_steps, 0, 0
    args.micro_batch_size, args.global_batch_size = 1, 0  # the loop's own affair
    args.load = args.dataloader_type = None
    args.create_attention_mask_in_dataloader = False  # dev's configuration sets it
    args.eval_iters = eval_iters
    args.consumed_train_samples = 0
    args.log_interval = log_interval or 0
    args.distributed_timeout_minutes = timeout / timedelta(minutes=1)
    fill_in_flags(args)
    return args


def _parallel_sizes(state: Any, *, num_chunks: int) -> dict[str, int | None]:
    """A configuration may leave them at 1: layers ask the parallel state."""
    return {
        "world_size": dist.get_world_size(),
        "data_parallel_size": state.get_data_parallel_world_size(),
        "context_parallel_size": state.get_context_parallel_world_size(),
        "tensor_model_parallel_size": state.get_tensor_model_parallel_world_size(),
        "pipeline_model_parallel_size": state.get_pipeline_model_parallel_world_size(),
        "expert_model_parallel_size": state.get_expert_model_parallel_world_size(),
        "expert_tensor_parallel_size": state.get_expert_tensor_parallel_world_size(),
        "virtual_pipeline_model_parallel_size": num_chunks if num_chunks > 1 else None,
    }


def _of_model(chunk: Any, *, inner: Any) -> dict[str, Any]:
    """Arguments that follow from the modules, as flags of Megatron's scripts would set them."""
    of_data_parallelism = getattr(chunk, "ddp_config", None)
    kinds = [type(module) for module in inner.modules()]
    engine = any("transformer_engine" in kind.__module__ for kind in kinds)
    stock_attention = any(kind.__name__ == "DotProductAttention" for kind in kinds)
    sharded = type(chunk).__name__ in _FSDP
    return {
        "transformer_impl": "transformer_engine" if engine else "local",
        # Megatron's local attention takes no packed sequences; another one comes from a spec of the loop's own.
        "spec": None if stock_attention and not engine else "the model's",
        "use_megatron_fsdp": sharded and bool(getattr(of_data_parallelism, "use_megatron_fsdp", True)),
        "use_torch_fsdp2": type(chunk).__name__ == _FSDP[1],
        "use_distributed_optimizer": bool(getattr(of_data_parallelism, "use_distributed_optimizer", False)),
        "untie_embeddings_and_output_weights": not getattr(inner, "share_embeddings_and_output_weights", False),
        "position_embedding_type": getattr(inner, "position_embedding_type", None),
        "bias_swiglu_fusion": bool(getattr(inner.config, "bias_activation_fusion", True)),
        "seq_length": getattr(inner, "max_sequence_length", 0),
    }
