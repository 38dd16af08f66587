"""The settings of a hand-written training loop, read from its model and Megatron's parallel state.

Rules ask for Megatron's options by name: a TransformerConfig has many of them under the same names, and the others
follow from the modules and the parallel state.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

from megatron_balance.cost.model import CostModel
from megatron_balance.errors import BalanceError
from megatron_balance.mcore.setup.alignment import token_alignment
from megatron_balance.mcore.setup.costs import costs_of_run
from megatron_balance.mcore.setup.flags import fill_in, parse_balance_flags
from megatron_balance.mcore.setup.settings import Settings, dynamic_cp_of, settings_of_flags
from megatron_balance.model.shape import ModelShape
from megatron_balance.topology import Topology

_OWN_FLAGS = ("--use-dynamic-batch-size", "--balance-data", "--balance-by-flops")

_FSDP = ("FullyShardedDataParallel", "TorchFullyShardedDataParallel")


def settings_of_loop(
    flags: Sequence[str],
    *,
    model: Any,
    max_tokens_per_gpu: int,
    cost: CostModel | ModelShape | None,
    num_steps: int | None,
    log_interval: int | None,
    timeout: timedelta,
    eval_iters: int = 0,
    lora_rank: int = 0,
) -> tuple[Mapping[str, Any], Callable[[], Settings]]:
    """The options of a loop by Megatron's names, for the rules, and what reads its settings.

    Arguments are those of `balanced_schedule`. With no `eval_iters`, forward-only calls stay Megatron's own; the base
    weights of adapters (`lora_rank`) are frozen.

    Raises:
        BalanceError: a flag is wrong or has no meaning here; the model's FLOPs or parallel state are not known.
    """
    from megatron.core import parallel_state as state
    from megatron.core.utils import get_model_config, unwrap_model

    if not state.model_parallel_is_initialized():
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
    if parsed.balance_by_flops and cost is None and vocab_size is None:
        raise BalanceError(
            f"{type(inner).__name__} has no vocab_size, so that its FLOPs are not known: give cost (a ModelShape or a "
            "CostModel), or the flag --no-balance-by-flops."
        )
    num_experts = config.num_moe_experts or 0
    options = ChainMap(
        vars(parsed),
        {  # A configuration may leave sizes at 1: layers ask the parallel state.
            "context_parallel_size": state.get_context_parallel_world_size(),
            "tensor_model_parallel_size": state.get_tensor_model_parallel_world_size(),
            "pipeline_model_parallel_size": state.get_pipeline_model_parallel_world_size(),
            "expert_model_parallel_size": state.get_expert_model_parallel_world_size(),
            "expert_tensor_parallel_size": state.get_expert_tensor_parallel_world_size(),
            "virtual_pipeline_model_parallel_size": len(chunks) if len(chunks) > 1 else None,
            "num_experts": num_experts,
            "create_attention_mask_in_dataloader": False,  # dev's configuration sets it
            "train_iters": num_steps,
            "log_interval": log_interval,
            "eval_iters": eval_iters,
        },
        _of_modules(chunks[0], inner=inner),
        vars(config),
    )
    fill_in(parsed, options=options)

    def shape() -> ModelShape:
        if isinstance(cost, ModelShape):
            return cost
        pattern = getattr(inner, "hybrid_layer_pattern", None) or getattr(inner, "hybrid_override_pattern", None)
        read = ModelShape.from_transformer_config(
            config, padded_vocab_size=vocab_size or 0, hybrid_layer_pattern=pattern or ""
        )
        return replace(read, lora_rank=lora_rank)

    def read() -> Settings:
        pp_size, interleaved = options["pipeline_model_parallel_size"], len(chunks) > 1
        topology = Topology(
            state.get_data_parallel_world_size(),
            cp_size=options["context_parallel_size"],
            tp_size=options["tensor_model_parallel_size"],
            pp_size=pp_size,
            ep_size=options["expert_model_parallel_size"],
            etp_size=options["expert_tensor_parallel_size"],
            vpp_size=len(chunks),
            microbatch_multiple=(config.microbatch_group_size_per_vp_stage or pp_size) if interleaved else 1,
            sequence_parallel=bool(config.sequence_parallel),
            fully_sharded=bool(options["use_megatron_fsdp"] or options["use_torch_fsdp2"]),
            token_alignment=token_alignment(config),
            **dynamic_cp_of(parsed),
        )
        costs = costs_of_run(
            parsed,
            config=config,
            topology=topology,
            shape=shape,
            num_experts=num_experts,
            seq_length=options["seq_length"],
            given=cost if isinstance(cost, CostModel) else None,
        )
        settings = settings_of_flags(
            parsed, options=options, config=config, topology=topology, costs=costs, num_experts=num_experts
        )
        balances_evaluation = eval_iters and parsed.balance_evaluation is not False and not topology.dynamic_cp
        if eval_iters and topology.dynamic_cp:
            says = "evaluation is Megatron's own: it runs at --context-parallel-size."
            settings = replace(settings, says=(*settings.says, says))
        return replace(
            settings,
            eval_limits=settings.limits if balances_evaluation else None,
            timeout=timeout,
            log_interval=log_interval or 0,
            loads_on_every_stage=parsed.balance_load_every_stage is not False,
            loads_on_every_tensor_rank=True,
        )

    return options, read


def _of_modules(chunk: Any, *, inner: Any) -> dict[str, Any]:
    """Options that follow from the modules, as flags of Megatron's scripts would set them."""
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
        "position_embedding_type": getattr(inner, "position_embedding_type", None),
        "seq_length": getattr(inner, "max_sequence_length", 0),
    }
