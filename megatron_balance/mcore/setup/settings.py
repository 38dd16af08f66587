"""Translates Megatron's options and the balance flags into the settings of a balanced run."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from typing import Any

from megatron_balance.cost.model import CostModel
from megatron_balance.cost.rates import RunCosts, run_costs
from megatron_balance.errors import BalanceError
from megatron_balance.mcore.setup.flags import ALL_RANKS
from megatron_balance.mcore.setup.rules import Options, autotuned, cautions, flag_text, holds
from megatron_balance.model.shape import ModelShape
from megatron_balance.runtime.process import device_nbytes
from megatron_balance.topology import Limits, Topology


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What this package needs to know of a run; equal on all ranks, but for the last three.

    Fields that are named as a balance flag have its value. `eval_limits` is None where evaluation is Megatron's own;
    `policy` names the flags that chose the plans, for people; `few_shapes` is that of `pack_microbatch`.
    """

    topology: Topology
    limits: Limits
    costs: RunCosts
    eval_limits: Limits | None = None
    balance_data: bool = True
    algorithm: str | None = None
    unpad: int | str | None = None
    loss_weighting: str | None = None  # None by tokens
    share_prefixes: bool = False
    overlaps_experts: bool = False
    overlap: bool = True
    verify: bool = False
    timeout: timedelta = timedelta(minutes=10)
    peer_timeout: timedelta = timedelta(minutes=10)  # how long peers wait for a rank once training runs
    log_interval: int = 0
    num_steps: int | None = None
    counts_router_tokens: bool = False
    few_shapes: bool = True
    policy: str = ""
    row_tokens: int | None = None
    num_rows: int | None = None
    tuned_steps: int = 0  # in which `tuned` settings are found: costs, cap
    tuned: tuple[str, ...] = ()
    speeds: tuple[int, ...] = ()  # of data-parallel ranks, by which plans are weighed
    costs_of: Callable[..., RunCosts] = field(default=RunCosts, repr=False)  # by a `calibration` that the run finds
    resumes: bool = field(default=False, repr=False)
    record: str | None = field(default=None, repr=False)
    log_lines: tuple[str, ...] = field(default=(), repr=False)

    @property
    def planning(self) -> dict[str, Any]:
        """The arguments of `build_data_schedule` that hold for every step."""
        topology, limits = self.topology, self.limits
        if limits.max_tokens_per_gpu is not None:
            share = topology.pack_multiple // topology.cp_size  # of a GPU, to which micro-batches are filled up
            limits = Limits(max(limits.max_tokens_per_gpu // share, 1) * share)
        if self.share_prefixes:  # a micro-batch is one sequence: no sample is filled up by itself
            topology = replace(topology, sequence_parallel=False)
        return {
            "cost_model": self.costs.model,
            "topology": topology,
            "limits": limits,
            "algorithm": self.algorithm or "auto",
            "move_samples": self.balance_data,
        }


def settings_of(options: Options, *, shape: Callable[[], ModelShape], cost: CostModel | None = None) -> Settings:
    """The settings of a run with validated options that go together (`rules.py`); `cost` is one in place of FLOPs."""
    topology = topology_of(options, shape=shape)
    costs_of = partial(run_costs, options, topology=topology, shape=shape)
    costs = costs_of(cost=cost)
    choices, rows = options.get("balance_choices"), options.get("micro_batch_size") or 1
    log_lines = [f"--balance sets {choices}"] if choices else []
    log_lines += costs.log_lines
    if topology.max_cp_size and options["balance_dynamic_cp"] == ALL_RANKS:
        log_lines.append(f"at most {topology.max_cp_size} ranks share a sample: each gets as many heads of its layers.")
    warnings = [*cautions(options), *logits_caution(options, topology=topology)]
    num_tuned, tuned = autotuned(options)
    eval_limits = None
    if options.get("full_validation") or options.get("eval_iters"):
        if topology.dynamic_cp:
            log_lines.append("evaluation is Megatron's own: it runs at --context-parallel-size.")
        elif options.get("sft"):
            log_lines.append("evaluation is Megatron's own: under --sft it averages means of micro-batches.")
        elif options["balance_evaluation"]:
            # Megatron has this size from 0.18 on.
            eval_limits = _limits(options, options.get("eval_micro_batch_size") or rows)
    return Settings(
        topology=topology,
        limits=_limits(options, rows),
        costs=costs,
        eval_limits=eval_limits,
        balance_data=bool(options["balance_data"]),
        loss_weighting=options["balance_loss_weighting"] if holds(WEIGHTED, options) else None,
        **{name: options[f"balance_{name}"] for name in _FLAGS},
        timeout=timeout_of(options),
        peer_timeout=timedelta(seconds=options.get("distributed_timeout_seconds_after_init") or 0)
        or timeout_of(options),
        overlaps_experts=bool(options.get("overlap_moe_expert_parallel_comm")),
        log_interval=options.get("log_interval") or 0,
        num_steps=options.get("train_iters"),
        counts_router_tokens=holds(_ROUTERS_COUNT_TOKENS, options),
        few_shapes=not any(holds(condition, options) for condition in _MISCOUNT_EMPTY),
        policy=policy_of(options),
        row_tokens=options.get("seq_length") if holds("sft/dataloader_inter_document_masking", options) else None,
        num_rows=options.get("global_batch_size"),
        tuned_steps=num_tuned,
        tuned=tuned,
        costs_of=costs_of,
        resumes=bool(options.get("load") and options.get("iteration")),
        log_lines=(*log_lines, *(f"WARNING: {text}" for text in warnings)),
    )


def logits_nbytes(options: Options, *, topology: Topology) -> tuple[int, str]:
    """Bytes of the fp32 logits of the longest micro-batch on a GPU, 0 where not known, and the flag that sets it."""
    # A sample over the cap runs alone, on as many context-parallel ranks as may share it.
    longest = -(-(options.get("seq_length") or 0) // topology.dynamic_cp_sizes[-1])
    rows = 1 if options["use_dynamic_batch_size"] else options.get("micro_batch_size") or 1
    tokens, flag = max((options.get("max_tokens_per_gpu") or 0, "max_tokens_per_gpu"), (longest * rows, "seq_length"))
    vocabulary = options.get("padded_vocab_size") or options.get("vocab_size") or 0
    is_fused = options.get("cross_entropy_loss_fusion") and options.get("cross_entropy_fusion_impl") == "linear"
    return 0 if is_fused else 4 * tokens * vocabulary // topology.tp_size, f"--{flag.replace('_', '-')} {options[flag]}"


def logits_caution(options: Options, *, topology: Topology) -> list[str]:
    """A caution where the logits of a micro-batch take more than half of this rank's device."""
    (nbytes, flag), device = logits_nbytes(options, topology=topology), device_nbytes()
    if not device or 2 * nbytes <= device:
        return []
    name, value = flag.split()
    return [
        f"{flag}: the logits of so many tokens take {nbytes / 2**30:.1f} GiB in fp32 on the last stage, more than half "
        f"of a device of {device / 2**30:.1f} GiB: lower it to {name} {int(value) * device // (2 * nbytes)}, or raise "
        "--tensor-model-parallel-size or, for long samples, --context-parallel-size."
    ]


_FLAGS = ("algorithm", "unpad", "share_prefixes", "overlap", "verify", "record")


def timeout_of(options: Options) -> timedelta:
    """`--distributed-timeout-minutes`."""
    return timedelta(minutes=options["distributed_timeout_minutes"])


_POLICY = ("use_dynamic_batch_size", "balance_data", "balance_dynamic_cp", "balance_cost")
_POLICY += ("balance_share_prefixes", "balance_algorithm")


def policy_of(options: Options) -> str:
    """The flags that choose the plans, for people."""
    values = {name: options[name] for name in _POLICY}
    return " ".join(flag_text(name, value) for name, value in values.items() if value not in (None, False, "tokens"))


def _limits(options: Options, micro_batch_size: int) -> Limits:
    if options["use_dynamic_batch_size"]:
        return Limits(options["max_tokens_per_gpu"])
    return Limits(micro_batch_size=micro_batch_size)


WEIGHTED = "!balance_loss_weighting=token,None"

_REDUCTIONS = (
    # transformer_block.py: one autocast a forward, at whose end Transformer Engine reduces amaxes over the group of
    # parallel_state.get_amax_reduction_group; and again in the backward pass. tp_only_amax_red leaves TP and static CP.
    "fp8 fp8_recipe=delayed !tp_only_amax_red",
    "fp8 fp8_recipe=delayed balance_dynamic_cp context_parallel_size>1",
    # moe/router.py, _apply_global_aux_loss
    "moe_router_load_balancing_type=global_aux_loss moe_aux_loss_coeff>0 num_experts",
)
"""When all data-parallel ranks reduce a number in every micro-batch."""


def topology_of(options: Options, *, shape: Callable[[], ModelShape]) -> Topology:
    """The ranks of a run; before validation as many data-parallel ranks as the world leaves.

    A largest context-parallel size over that of the model's layers raises BalanceError.
    """
    tp_size, pp_size, cp_size = (
        options[f"{kind}_parallel_size"] for kind in ("tensor_model", "pipeline_model", "context")
    )
    dp_size = options.get("data_parallel_size") or options.get("world_size", 1) // (tp_size * pp_size * cp_size)
    # Before validation the options of a virtual pipeline have other names, and plans nothing to follow.
    interleaved = options.get("virtual_pipeline_model_parallel_size")
    limit, largest = options.get("balance_dynamic_cp"), None
    if limit is not None:
        by_heads = holds("cp_comm_type=a2a", options)
        largest = shape().largest_cp_size(tp_size, attention_by_heads=by_heads)
        if limit != ALL_RANKS and largest is not None and limit > largest:
            raise BalanceError(
                f"--balance-dynamic-cp is {limit}, but at most {largest} ranks can share a sample: each gets as many "
                f"heads (and groups) of the model's layers by --tensor-model-parallel-size {tp_size}"
                f"{' and --cp-comm-type a2a' * by_heads}; set {largest} or less, or leave the number out."
            )
    return Topology(
        max(dp_size, 1),
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
        max_cp_size=largest if limit == ALL_RANKS else limit,
    )


# Kernels skip empty sequences; delta nets miscount them, and unfused rotary code runs some kernels for each.
_MISCOUNT_EMPTY = (":delta_net", "position_embedding_type=rope,yarn,mrope !apply_rope_fusion")

_ROUTERS_COUNT_TOKENS = "moe_aux_loss_coeff/moe_z_loss_coeff/moe_router_enable_expert_bias num_experts"

# Low-precision layers take multiples of tokens, to which micro-batches and the cap are rounded. They count tokens of a
# rank, once context and sequence parallelism have split the micro-batch; docs/megatron.md has those of each recipe.
# Sources: Transformer Engine 2.3 to 2.20, common/gemm/cublaslt_gemm.cu, common/cast/nvfp4, pytorch/csrc/quantizer.cpp
# and `is_quantizable` in pytorch/tensor; Megatron 0.17 to 0.19, `get_fp8_align_size`, `get_fp4_align_size`. Experts pad
# their own tokens; only where routing is padded instead does a rank need as many tokens as its fullest expert gets.

RECIPE_TOKENS = {"delayed": 16, "tensorwise": 16, "mxfp8": 32, "blockwise": 128, "nvfp4": 128}
"""By the name of `--fp8-recipe` or `--fp4-recipe`."""

FUSED_EXPERT_TOKENS = 256
"""Megatron's grouped GEMMs of fused operations take experts of a multiple of this many tokens."""


def token_alignment(options: Options) -> int:
    """The alignment of a run, for `Topology.token_alignment`; 1 without FP8 and FP4. Other recipes are refused."""
    precision = next((name for name in ("fp8", "fp4") if options.get(name)), None)
    if precision is None:
        return 1
    recipe = options[f"{precision}_recipe"]
    tokens = RECIPE_TOKENS[str(getattr(recipe, "value", recipe))]
    pads_routing = ("moe_router_padding_for_quantization", "moe_router_padding_for_fp8")
    fuses = ("use_transformer_engine_op_fuser", "moe_use_grouped_tensor")
    if all(any(map(options.get, names)) for names in (pads_routing, fuses)):
        return math.lcm(tokens, FUSED_EXPERT_TOKENS)
    return tokens
