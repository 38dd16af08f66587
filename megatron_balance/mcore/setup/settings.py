"""The settings of a balanced run, read once from its options: Megatron's and the balance flags by name (`options/`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path

import numpy as np

from megatron_balance.cost.calibration import UNITS_PER_SECOND, Calibration
from megatron_balance.cost.model import CostModel
from megatron_balance.cost.rates import (
    ASSUMED_TFLOPS,
    ATTENTION_RATES,
    BETWEEN_NODES,
    WITHIN_NODE,
    exchange_flops_per_token,
)
from megatron_balance.mcore.options import Options, cautions, has_delta_net, holds
from megatron_balance.mcore.setup.alignment import bucketed_limits, token_alignment
from megatron_balance.mcore.setup.flags import ALL_RANKS
from megatron_balance.model.shape import ModelShape
from megatron_balance.runtime.process import ranks_of_node
from megatron_balance.topology import Limits, Topology


@dataclass(frozen=True)
class Costs:
    """The cost of a sample: tokens, the FLOPs of its model, or the seconds of `--balance-cost`; lines for the log.

    `attention_rate` is that which FLOPs are weighed by, None for other costs.
    """

    model: CostModel
    name: str = "tokens"
    attention_rate: float | None = None
    says: tuple[str, ...] = field(default=(), repr=False)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What this package needs to know of a run; equal on all ranks, but for the last three.

    Fields that are named as a balance flag have its value. `eval_limits` is None where evaluation is Megatron's own;
    `policy` names the flags that chose the plans, for people; `few_shapes` is that of `pack_microbatch`.
    """

    topology: Topology
    limits: Limits
    costs: Costs
    eval_limits: Limits | None = None
    balance_data: bool = True
    shape_bucket: int = 1
    objective: str = "auto"
    algorithm: str = "auto"
    unpad: int | str | None = None
    overlap: bool = True
    timeout: timedelta = timedelta(minutes=10)
    peer_timeout: timedelta = timedelta(minutes=10)  # how long peers wait for a rank once training runs
    log_interval: int = 0
    num_steps: int | None = None
    counts_router_tokens: bool = False
    few_shapes: bool = True
    policy: str = ""
    row_tokens: int | None = None
    num_rows: int | None = None
    resumes: bool = field(default=False, repr=False)
    record: str | None = field(default=None, repr=False)
    says: tuple[str, ...] = field(default=(), repr=False)


def settings_of(options: Options, *, shape: Callable[[], ModelShape], cost: CostModel | None = None) -> Settings:
    """The settings of a run with validated options that go together (`options/`); `cost` is one in place of FLOPs."""
    topology = topology_of(options)
    costs = costs_of(options, topology=topology, shape=shape, given=cost)
    chosen, rows = options.get("balance_choices"), options.get("micro_batch_size") or 1
    says = (*([f"--balance chose {'; '.join(chosen)}"] if chosen else []), *costs.says)
    eval_limits = None
    if options.get("full_validation") or options.get("eval_iters"):
        balances, stays = options["balance_evaluation"], ""
        if balances is None and topology.dynamic_cp:
            stays = "it runs at --context-parallel-size"
        elif balances is None and options.get("sft"):
            stays = "under --sft it averages means of micro-batches; --balance-evaluation divides sums over tokens"
        if stays:
            says = (*says, f"evaluation is Megatron's own: {stays}.")
        elif balances is not False:
            # Megatron has this size from 0.18 on.
            eval_limits = _limits(options, options.get("eval_micro_batch_size") or rows, topology=topology)
    return Settings(
        topology=topology,
        limits=_limits(options, rows, topology=topology),
        costs=costs,
        eval_limits=eval_limits,
        balance_data=bool(options["balance_data"]),
        **{name: options[f"balance_{name}"] for name in _OWN_FLAGS},
        timeout=timeout_of(options),
        peer_timeout=timedelta(seconds=options.get("distributed_timeout_seconds_after_init") or 0)
        or timeout_of(options),
        log_interval=options.get("log_interval") or 0,
        num_steps=options.get("train_iters"),
        counts_router_tokens=_routers_count_tokens(options),
        few_shapes=_takes_empty_sequences(options),
        policy=policy_of(options),
        row_tokens=options.get("seq_length") if _fills_rows(options) else None,
        num_rows=options.get("global_batch_size"),
        resumes=bool(options.get("load") and options.get("iteration")),
        says=(*says, *(f"WARNING: {caution}" for caution in cautions(options))),
    )


_OWN_FLAGS = ("shape_bucket", "objective", "algorithm", "unpad", "overlap", "record")


def _fills_rows(options: Options) -> bool:
    return bool(options.get("sft") or options.get("dataloader_inter_document_masking"))


def timeout_of(options: Options) -> timedelta:
    """`--distributed-timeout-minutes`."""
    return timedelta(minutes=options["distributed_timeout_minutes"])


def policy_of(options: Options) -> str:
    """The flags that choose the plans, for people."""
    limit = options["balance_dynamic_cp"]
    chosen = {
        "--use-dynamic-batch-size": options["use_dynamic_batch_size"],
        "--balance-data": options["balance_data"],
        f"--balance-dynamic-cp {'' if limit == ALL_RANKS else limit}".rstrip(): limit is not None,
        f"--balance-cost {options['balance_cost']}": options["balance_cost"] not in (None, "tokens"),
        f"--balance-shape-bucket {options['balance_shape_bucket']}": options["balance_shape_bucket"] > 1,
        f"--balance-objective {options['balance_objective']}": options["balance_objective"] != "auto",
        f"--balance-algorithm {options['balance_algorithm']}": options["balance_algorithm"] != "auto",
    }
    return " ".join(flag for flag, is_set in chosen.items() if is_set)


def _limits(options: Options, micro_batch_size: int, *, topology: Topology) -> Limits:
    """The limits of a micro-batch; a bucket over the cap raises BalanceError."""
    if not options["use_dynamic_batch_size"]:
        return Limits(micro_batch_size=micro_batch_size)
    bucket = options["balance_shape_bucket"]
    return bucketed_limits(options["max_tokens_per_gpu"], topology=topology, shape_bucket=bucket)


def costs_of(
    options: Options, *, topology: Topology, shape: Callable[[], ModelShape], given: CostModel | None = None
) -> Costs:
    """The costs that balance flags choose; `given` is one in place of FLOPs."""
    exchange, by_cp = 0, "receiving a token's keys and values from context-parallel ranks"
    name = options.get("balance_cost") or "tokens"
    if name == "tokens":
        line = f"{by_cp}: not counted beside tokens: add --balance-cost flops."
        return Costs(CostModel.tokens(), says=(line,) if topology.dynamic_cp else ())
    says: tuple[str, ...] = ()
    calibration = rate = None
    if name != "flops":
        file, name = name, "seconds"
        calibration = Calibration.read(Path(file))
        # Where sizes differ, the planner shares a sample's cost among its context-parallel ranks itself.
        sharing = topology.tp_size * (1 if topology.dynamic_cp else topology.cp_size)
        cost_model = calibration.cost_model(ep_size=topology.ep_size, model_parallel_size=sharing)
        if notice := calibration.extrapolation(options.get("seq_length") or 0):
            says = (f"WARNING: --balance-cost {file}: {notice}",)
    elif given is not None:
        cost_model = given
    else:
        rate, reason = options.get("balance_attention_rate"), "--balance-attention-rate"
        if rate is None:
            kind = "moe" if options.get("num_experts") else "dense"
            rate = ATTENTION_RATES[kind, "fp8" if options.get("fp8") else "bf16"]
            reason = f"what loses least over published GPUs for this precision and kind of model; {reason} sets it"
        says = (f"FLOPs count attention at {rate:g} times the rate of all else: {reason}.",)
        cost_model = CostModel.from_shape(
            shape(),
            ep_size=topology.ep_size,
            pack_tokens=(options.get("max_tokens_per_gpu") or 0) * topology.cp_size,
            attention_tflops=rate,
        )
    if topology.dynamic_cp:
        exchange, source = _exchange(options, topology=topology, shape=shape, calibration=calibration)
        linear = cost_model.linear + cost_model.expert_linear
        part = f"{exchange / linear:.2%} of a token's linear cost" if linear else "all that a token costs"
        says = (f"{by_cp}: {part}, {source}.", *says)
    cost_model = replace(cost_model, cp_exchange=exchange)
    return Costs(cost_model, name, rate, says)


def _exchange(
    options: Options, *, topology: Topology, shape: Callable[[], ModelShape], calibration: Calibration | None
) -> tuple[int, str]:
    """The cost of receiving a token's keys and values, one value in a run, and where it comes from."""
    if calibration is not None and calibration.costs.cp_exchange:
        # The file is of all heads; each tensor-parallel rank receives its own.
        measured = calibration.cost_model(model_parallel_size=topology.tp_size).cp_exchange
        return measured, "measured in the run of --balance-cost"
    # Megatron numbers ranks with tensor parallelism innermost, then context, then data parallelism, and launchers put
    # consecutive ranks on a node.
    (node_size, source), ranks_of_group = ranks_of_node(), topology.tp_size * topology.dynamic_cp_sizes[-1]
    spans_nodes = topology.num_gpus > (node_size or 1) and (node_size or 1) % ranks_of_group
    link, where = (BETWEEN_NODES, "between nodes") if spans_nodes else (WITHIN_NODE, "within a node")
    where += f" of {node_size} ranks by {source}" if node_size else ""
    assumed = exchange_flops_per_token(
        shape(),
        bytes_per_second=link,
        # FLOPs at the second rate are attoseconds.
        tflops=UNITS_PER_SECOND / 1e12 / topology.tp_size if calibration else ASSUMED_TFLOPS,
    )
    return assumed, (
        f"of which attention hides what it can, assumed from {link / 1e9:g} GB/s {where}"
        f"{'' if calibration else f' and {ASSUMED_TFLOPS:g} TFLOP/s'}; megatron-balance fit "
        "measures it in a run with --balance-dynamic-cp"
    )


_REDUCTIONS = (
    # transformer_block.py: one autocast a forward, at whose end Transformer Engine reduces amaxes over the group of
    # parallel_state.get_amax_reduction_group; and again in the backward pass. tp_only_amax_red leaves TP and static CP.
    "fp8 fp8_recipe=delayed !tp_only_amax_red",
    "fp8 fp8_recipe=delayed balance_dynamic_cp context_parallel_size>1",
    # moe/router.py, _apply_global_aux_loss
    "moe_router_load_balancing_type=global_aux_loss :aux_loss",
)
"""When all data-parallel ranks reduce a number in every micro-batch."""


def topology_of(options: Options) -> Topology:
    """The ranks of a run; before validation as many data-parallel ranks as the world leaves."""
    tp_size, pp_size, cp_size = (
        options[f"{kind}_parallel_size"] for kind in ("tensor_model", "pipeline_model", "context")
    )
    left = options.get("world_size", 1) // (tp_size * pp_size * cp_size)
    # Before validation the options of a virtual pipeline have other names, and plans nothing to follow.
    interleaved = options.get("virtual_pipeline_model_parallel_size")
    limit = options.get("balance_dynamic_cp")
    return Topology(
        options.get("data_parallel_size") or max(left, 1),
        cp_size=cp_size,
        tp_size=tp_size,
        pp_size=pp_size,
        ep_size=options["expert_model_parallel_size"],
        etp_size=options["expert_tensor_parallel_size"] or tp_size,
        vpp_size=interleaved or 1,
        microbatch_multiple=(options["microbatch_group_size_per_vp_stage"] or pp_size) if interleaved else 1,
        sequence_parallel=bool(options["sequence_parallel"]),
        fully_sharded=bool(options["use_megatron_fsdp"] or options["use_torch_fsdp2"]),
        reduces_in_microbatches=any(holds(condition, options) for condition in _REDUCTIONS),
        token_alignment=token_alignment(options),
        dynamic_cp=limit is not None,
        max_cp_size=None if limit == ALL_RANKS else limit,
    )


def _takes_empty_sequences(options: Options) -> bool:
    """Kernels skip empty sequences; delta nets miscount them, and unfused rotary code runs some kernels for each."""
    rotates = options.get("position_embedding_type") in ("rope", "yarn", "mrope")
    return not has_delta_net(options) and bool(options.get("apply_rope_fusion") or not rotates)


def _routers_count_tokens(options: Options) -> bool:
    losses = np.any(np.atleast_1d(options["moe_aux_loss_coeff"])) or options["moe_z_loss_coeff"] is not None
    return bool(options.get("num_experts") and (losses or options["moe_router_enable_expert_bias"]))
