"""The settings of a balanced run, read once from Megatron's arguments; `loop_settings.py` reads them from a model.

Megatron's namespace is read here and in `state.py` alone.
"""

from __future__ import annotations

import importlib
import inspect
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

import numpy as np

from megatron_balance.cost.model import CostModel
from megatron_balance.mcore.options import cautions
from megatron_balance.mcore.setup.alignment import bucketed_limits, token_alignment
from megatron_balance.mcore.setup.costs import Costs, costs_of_run
from megatron_balance.mcore.setup.flags import ALL_RANKS
from megatron_balance.model.shape import ModelShape
from megatron_balance.topology import Limits, Topology


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What this package needs to know of a run; equal on all ranks, but for the last four.

    Attributes:
        topology: the ranks.
        limits: of a micro-batch; the cap is rounded down, so that a bucket's padding stays below it.
        eval_limits: of a micro-batch of evaluation; None where evaluation is Megatron's own.
        cost_model: of a sample.
        cost_name: `tokens`, `flops` or `seconds`.
        attention_rate: as in `Costs`.
        patch_values: numbers of a patch of the vision encoder; 0 where that is not known.
        balance_data: samples move between ranks.
        shape_bucket: micro-batches are padded to a multiple of this on each GPU, tokens; 1 for none.
        objective: `auto`, `step`, `microbatch` or `pipeline`.
        algorithm: `auto` or `karmarkar_karp`.
        unit: `segment` or `sample`.
        unpad: the token id of padding in rows without cu_seqlens, or `attention_mask`; None where rows are packed.
        overlap: prepare the next step while one runs.
        timeout: of collectives.
        log_interval: steps between log lines.
        micro_batch_size: samples of an item.
        first_sample: index in the data set of the first sample that the run loads, or None where the sampler's order is
            not known (any but `single`).
        counts_router_tokens: MoE routers count tokens, for auxiliary losses or the expert bias.
        loads_on_every_stage: pipeline stages between the first and the last load data too.
        loads_on_every_tensor_rank: each rank of a tensor-parallel group may be given an iterator, as in a hand-written
            loop; otherwise the first one alone is.
        overlaps_passes: forward and backward passes run together, so that none can be timed.
        policy: the flags that chose the plans, for people.
        resumes: the run continues a checkpoint's; with `--finetune` it starts again.
        record: folder of the run's record, or None. Ranks may name it differently.
        says, warns: lines for the log.
    """

    topology: Topology
    limits: Limits
    cost_model: CostModel
    eval_limits: Limits | None = None
    cost_name: str = "tokens"
    attention_rate: float | None = None
    patch_values: int = 0
    balance_data: bool = True
    shape_bucket: int = 1
    objective: str = "auto"
    algorithm: str = "auto"
    unit: str = "segment"
    unpad: int | str | None = None
    overlap: bool = True
    timeout: timedelta = timedelta(minutes=10)
    log_interval: int = 0
    micro_batch_size: int = 1
    first_sample: int | None = None
    counts_router_tokens: bool = False
    loads_on_every_stage: bool = True
    loads_on_every_tensor_rank: bool = False
    overlaps_passes: bool = False
    policy: str = ""
    resumes: bool = field(default=False, repr=False)
    record: str | None = field(default=None, repr=False)
    says: tuple[str, ...] = field(default=(), repr=False)
    warns: tuple[str, ...] = field(default=(), repr=False)


def settings_of_args(args: Namespace) -> Settings:
    """The settings of a run of Megatron's training loop, from validated arguments that go together (`options/`).

    Raises:
        BalanceError: a file of --balance-cost that cannot be read, a model whose FLOPs are not known, a bucket over the
            cap, or a recipe of FP8 or FP4 that is not known.
    """
    topology = topology_of_args(args)
    settings = settings_of_flags(
        args,
        options=vars(args),
        config=args,
        topology=topology,
        costs=costs_of_args(args, topology=topology),
        num_experts=args.num_experts,
    )
    eval_limits = None
    if getattr(args, "full_validation", False) or args.eval_iters:
        reason = _why_stock_evaluation(args)
        if reason:
            settings = replace(settings, says=(*settings.says, f"evaluation is Megatron's own: {reason}."))
        if not reason and args.balance_evaluation is not False:
            # Megatron has this size from 0.18 on.
            rows = getattr(args, "eval_micro_batch_size", None) or args.micro_batch_size
            eval_limits = limits_of(args, micro_batch_size=rows, topology=topology)
    return replace(
        settings,
        limits=limits_of(args, micro_batch_size=args.micro_batch_size, topology=topology),
        eval_limits=eval_limits,
        timeout=timeout_of(args),
        log_interval=args.log_interval,
        micro_batch_size=args.micro_batch_size,
        first_sample=args.consumed_train_samples if args.dataloader_type == "single" else None,
        loads_on_every_stage=loads_on_every_stage(args),
        resumes=bool(args.load and args.iteration),
    )


def settings_of_flags(
    flags: Namespace, *, options: Mapping[str, Any], config: Any, topology: Topology, costs: Costs, num_experts: int
) -> Settings:
    """What the balance flags say, for any loop; `options` are Megatron's by name, these flags among them."""
    chosen = getattr(flags, "balance_choices", None)
    return Settings(
        topology=topology,
        limits=limits_of(flags, micro_batch_size=1, topology=topology),
        cost_model=costs.cost_model,
        cost_name=costs.name,
        attention_rate=costs.attention_rate,
        patch_values=costs.patch_values,
        balance_data=bool(flags.balance_data),
        shape_bucket=flags.balance_shape_bucket,
        objective=flags.balance_objective,
        algorithm=flags.balance_algorithm,
        unit=flags.balance_unit,
        unpad=flags.balance_unpad,
        overlap=flags.balance_overlap,
        counts_router_tokens=bool(num_experts) and _routers_count_tokens(config),
        overlaps_passes=bool(getattr(config, "overlap_moe_expert_parallel_comm", False)),
        policy=policy_of(flags),
        record=flags.balance_record,
        says=(*([f"--balance chose {'; '.join(chosen)}"] if chosen else []), *costs.says),
        warns=(*cautions(options), *costs.warns),
    )


def timeout_of(args: Namespace) -> timedelta:
    """`--distributed-timeout-minutes`."""
    return timedelta(minutes=args.distributed_timeout_minutes)


def policy_of(flags: Namespace) -> str:
    """The flags that choose the plans, for people."""
    limit = flags.balance_context_parallel
    chosen = {
        "--use-dynamic-batch-size": flags.use_dynamic_batch_size,
        "--balance-data": flags.balance_data,
        f"--balance-context-parallel {'' if limit == ALL_RANKS else limit}".rstrip(): limit is not None,
        "--balance-by-flops": flags.balance_by_flops,
        "--balance-cost": flags.balance_cost is not None,
        f"--balance-shape-bucket {flags.balance_shape_bucket}": flags.balance_shape_bucket > 1,
        f"--balance-objective {flags.balance_objective}": flags.balance_objective != "auto",
        f"--balance-algorithm {flags.balance_algorithm}": flags.balance_algorithm != "auto",
    }
    return " ".join(flag for flag, is_set in chosen.items() if is_set)


def limits_of(flags: Namespace, *, micro_batch_size: int, topology: Topology) -> Limits:
    """The limits of a micro-batch; a bucket over the cap raises BalanceError."""
    if not flags.use_dynamic_batch_size:
        return Limits(micro_batch_size=micro_batch_size)
    return bucketed_limits(
        Limits(flags.max_tokens_per_gpu),
        topology=topology,
        shape_bucket=flags.balance_shape_bucket,
        flag="--balance-shape-bucket",
    )


def costs_of_args(args: Namespace, *, topology: Topology | None = None, by_flops: bool | None = None) -> Costs:
    """The cost of a sample in a run of Megatron's; arguments and errors as for `settings_of_args`."""
    return costs_of_run(
        args,
        config=args,
        topology=topology or topology_of_args(args),
        shape=lambda: ModelShape.from_megatron_args(args),
        num_experts=args.num_experts or 0,
        seq_length=getattr(args, "seq_length", 0),
        by_flops=by_flops,
    )


def topology_of_args(args: Namespace) -> Topology:
    """The ranks of a run of Megatron's; before validation as many data-parallel ranks as the world leaves."""
    tp_size, pp_size, cp_size = (
        getattr(args, f"{kind}_parallel_size") for kind in ("tensor_model", "pipeline_model", "context")
    )
    left = getattr(args, "world_size", 1) // (tp_size * pp_size * cp_size)
    # Before validation the options of a virtual pipeline have other names, and plans nothing to follow.
    interleaved = getattr(args, "virtual_pipeline_model_parallel_size", None)
    return Topology(
        getattr(args, "data_parallel_size", None) or max(left, 1),
        cp_size=cp_size,
        tp_size=tp_size,
        pp_size=pp_size,
        ep_size=args.expert_model_parallel_size,
        etp_size=args.expert_tensor_parallel_size or tp_size,
        vpp_size=interleaved or 1,
        microbatch_multiple=(args.microbatch_group_size_per_vp_stage or pp_size) if interleaved else 1,
        sequence_parallel=bool(args.sequence_parallel),
        fully_sharded=bool(args.use_megatron_fsdp or args.use_torch_fsdp2),
        token_alignment=token_alignment(args),
        **dynamic_cp_of(args),
    )


def dynamic_cp_of(flags: Namespace) -> dict[str, Any]:
    """The fields of a Topology that `--balance-context-parallel` sets."""
    limit = getattr(flags, "balance_context_parallel", None)
    return {"dynamic_cp": limit is not None, "max_cp_size": None if limit == ALL_RANKS else limit}


def loads_on_every_stage(args: Namespace) -> bool:
    """`--balance-load-every-stage`, or what is safe where it is not given.

    Stages between the first and the last need no more than the starts of sequences if the forward step asks for no
    more. Megatron's own `get_batch` does not: in pretrain_gpt.py and pretrain_hybrid.py, from 0.18, it returns
    `cu_seqlens`, `cu_seqlens_padded` and `max_seqlen` there and None for the rest, under `--sft` and
    `--dataloader-inter-document-masking`. Another script may read tokens or labels on every stage (rotary positions of
    images, routing by token). `get_batch` of 0.17 and of the dev branch reads the keys of every micro-batch itself.
    """
    if getattr(args, "mtp_num_layers", None) and getattr(args, "pipeline_model_parallel_layout", None):
        return True  # a layout may put the layers of multi-token prediction, which read tokens, on any stage
    if args.balance_load_every_stage is not None:
        return bool(args.balance_load_every_stage)
    if not any(getattr(args, flag, False) for flag in ("sft", "dataloader_inter_document_masking")):
        return True
    utils: Any = importlib.import_module("megatron.training.utils")
    function = getattr(utils, "get_batch_on_this_tp_rank", None)
    # That which takes the iterator, and not the micro-batch, reads all keys.
    return function is not None and "data_iterator" in inspect.signature(function).parameters


def _why_stock_evaluation(args: Namespace) -> str:
    """The reason for stock evaluation where no flag asks for it; empty where it is balanced."""
    if args.balance_evaluation is None and args.balance_context_parallel is not None:
        return "it runs at --context-parallel-size"
    if args.balance_evaluation is None and getattr(args, "sft", False):
        return (
            "under --sft its loss is a mean of means of micro-batches, which other micro-batches would change. "
            "--balance-evaluation balances it, and divides the sum over tokens by the tokens"
        )
    return ""


def _routers_count_tokens(config: Any) -> bool:
    if "quantile_balancing" in np.atleast_1d(config.moe_router_load_balancing_type):
        return False  # quantile balancing refuses masks
    has_aux_loss = bool(np.any(np.atleast_1d(config.moe_aux_loss_coeff)))
    return has_aux_loss or config.moe_z_loss_coeff is not None or bool(config.moe_router_enable_expert_bias)
