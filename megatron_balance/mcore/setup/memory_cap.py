"""Derives the token cap of `--max-tokens-per-gpu auto` from the run's arguments and its GPUs' memory.

Invariant: every rank has the same cap, that of the rank with the least memory.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch

from megatron_balance.errors import BalanceError
from megatron_balance.mcore.setup.arguments import BalanceConfig, topology_from_megatron_args
from megatron_balance.mcore.setup.groups import meeting_of_world
from megatron_balance.mcore.setup.run_log import RunLog
from megatron_balance.memory.budget import DerivedCap, budget_of_device, derive_cap, gib_to_bytes
from megatron_balance.memory.model import MemoryModel, TrainingMemory, memory_model
from megatron_balance.memory.precision import Precision
from megatron_balance.model.shape import ModelShape
from megatron_balance.runtime.agreement import gather_texts


def training_memory(args: Any) -> TrainingMemory:
    """Precision, sharding and recomputation of a run, from validated arguments.

    Optimizers of lower precision, offloading and fp8 take less than is counted here.
    """
    precision = Precision() if args.bf16 or args.fp16 else Precision.fp32()
    # torch operations one by one: Megatron's local layers, or Transformer Engine's with their fusion turned off.
    fused = args.transformer_impl != "local" and bool(getattr(args, "bias_swiglu_fusion", True))
    return TrainingMemory(
        precision=replace(
            precision,
            fused=fused,
            qk_layernorm=bool(args.qk_layernorm),
            hidden_dropout=bool(args.hidden_dropout),
        ),
        distributed_optimizer=bool(args.use_distributed_optimizer),
        untied_embeddings=bool(args.untie_embeddings_and_output_weights),
        recompute_granularity=args.recompute_granularity,
        recompute_modules=frozenset(args.recompute_modules or ("core_attn",)),
        recompute_method=args.recompute_method or "uniform",
        recompute_num_layers=args.recompute_num_layers or 1,
    )


def memory_model_from_megatron_args(args: Any) -> MemoryModel:
    """Memory model of a run, from validated arguments.

    Raises:
        BalanceError: the model has layers that are not known here.
    """
    return memory_model(
        ModelShape.from_megatron_args(args),
        topology=topology_from_megatron_args(args),
        training=training_memory(args),
    )


def derived_cap(config: BalanceConfig, *, args: Any) -> DerivedCap | None:
    """The cap of this rank under `--max-tokens-per-gpu auto`; None where a number is given.

    Args:
        config: the flags.
        args: Megatron's validated arguments.

    Raises:
        BalanceError: there is no budget, or nothing fits it.
    """
    if not config.derives_cap:
        return None
    if config.memory_gib is not None:
        budget = gib_to_bytes(config.memory_gib, flag="--balance-memory-gib")
    else:
        budget = budget_of_device(torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory)
        if not budget:
            raise BalanceError(
                "--max-tokens-per-gpu is auto, and this device reports no memory (the CPU): give --balance-memory-gib, "
                "or the cap in tokens."
            )
    return derive_cap(
        memory_model_from_megatron_args(args),
        budget_bytes=budget,
        topology=topology_from_megatron_args(args),
        shape_bucket=config.shape_bucket,
        seq_length=args.seq_length,
    )


def with_smallest_cap(config: BalanceConfig, *, timeout: timedelta) -> BalanceConfig:
    """The flags with the smallest cap of all ranks. All ranks of the world take part, after they have agreed to.

    Args:
        config: of this rank, its cap derived.
        timeout: after which missing ranks are named.
    """
    meeting = meeting_of_world(timeout=timeout)
    if not config.derives_cap or meeting is None:
        return config
    caps = gather_texts(str(config.max_tokens_per_gpu), meeting=meeting, topic="--max-tokens-per-gpu")
    return replace(config, max_tokens_per_gpu=min(map(int, caps)))


def log_cap(log: RunLog, *, cap: DerivedCap, tokens: int, seq_length: int, cp_size: int) -> None:
    """Log a derived cap, and warn where the longest sample exceeds it.

    Args:
        log: prints.
        cap: of this rank.
        tokens: the smallest cap of all ranks.
        seq_length: tokens of the longest sample.
        cp_size: context-parallel ranks, over which a micro-batch is spread.
    """
    least = "" if tokens == cap.tokens else f"{tokens} on another rank; here "
    log.say(f"--max-tokens-per-gpu auto is {least}{cap}")
    held = tokens * cp_size
    if seq_length > held:
        log.warn_once(
            f"a sample of --seq-length {seq_length} is longer than the {held} tokens that fit the memory of a "
            "micro-batch. Such samples run alone and may run out of memory: shorten them, add "
            "--context-parallel-size, or --recompute-granularity full."
        )
