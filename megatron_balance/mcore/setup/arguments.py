"""Reads a run's arguments once into a `BalanceConfig`, a cost model and a topology.

Megatron's namespace is read here and in the other files of this folder alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from megatron_balance.cost.calibration import Calibration
from megatron_balance.cost.model import MICROBATCH_TOKENS, CostModel
from megatron_balance.cost.profiles import default_attention_rate
from megatron_balance.errors import BalanceError
from megatron_balance.mcore.options import problems
from megatron_balance.mcore.setup.cp_exchange import ExchangeCost, exchange_cost
from megatron_balance.mcore.setup.shape_buckets import bucketed_limits
from megatron_balance.mcore.setup.token_alignment import token_alignment
from megatron_balance.model.shape import ModelShape
from megatron_balance.topology import Limits, Topology

ALL_RANKS = "all"
"""`--balance-context-parallel` without a limit."""


@dataclass(frozen=True)
class BalanceConfig:
    """The settings that a run's flags choose.

    Attributes:
        use_dynamic_batch_size: pack by tokens.
        max_tokens_per_gpu: the cap, tokens; None without dynamic batching.
        shape_bucket: micro-batches are padded to a multiple of this on each GPU, tokens; 1 for none.
        balance_data: move samples between ranks.
        dynamic_cp: each micro-batch has a context-parallel size of its own.
        max_cp_size: the largest such size, or None for as large as the ranks allow.
        balance_by_flops: FLOPs are the cost.
        cost_file: path of a seconds.json whose seconds are the cost in place of FLOPs, or None.
        objective: `auto`, `step`, `microbatch` or `pipeline`.
        algorithm: `auto` or `karmarkar_karp`.
        overlap: prepare the next step while this one runs.
        evaluation: balance evaluation; None for where that leaves its loss as it is.
        unit: `segment` or `sample`.
        unpad: the token id of padding in rows without cu_seqlens, or `attention_mask`; None where rows are packed.
        deterministic: runs must be reproducible (`--deterministic-mode`): no plan depends on the time of others.
        record: folder of the run's record, or None. Ranks may name it differently.
    """

    use_dynamic_batch_size: bool = False
    max_tokens_per_gpu: int | None = None
    shape_bucket: int = 1
    balance_data: bool = False
    dynamic_cp: bool = False
    max_cp_size: int | None = None
    balance_by_flops: bool = False
    cost_file: str | None = None
    objective: str = "auto"
    algorithm: str = "auto"
    overlap: bool = True
    evaluation: bool | None = None
    unit: str = "segment"
    unpad: int | str | None = None
    deterministic: bool = False
    record: str | None = field(default=None, repr=False)

    @classmethod
    def from_megatron_args(cls, args: Any) -> BalanceConfig:
        """Read and check the flags.

        Args:
            args: Megatron's namespace, parsed; it need not be validated yet.

        Raises:
            BalanceError: options that cannot work together (options/); names the option, the value and the remedy.
        """
        for problem in problems(args):
            raise BalanceError(problem)
        return cls.unchecked(args)

    @classmethod
    def unchecked(cls, args: Any) -> BalanceConfig:
        """Read the flags as they are; arguments as for `from_megatron_args`."""
        return cls(
            use_dynamic_batch_size=bool(args.use_dynamic_batch_size),
            max_tokens_per_gpu=args.max_tokens_per_gpu,
            shape_bucket=args.balance_shape_bucket,
            balance_data=bool(args.balance_data),
            dynamic_cp=args.balance_context_parallel is not None,
            max_cp_size=_max_cp_size(args),
            balance_by_flops=bool(args.balance_by_flops),
            cost_file=args.balance_cost,
            objective=args.balance_objective,
            algorithm=args.balance_algorithm,
            overlap=args.balance_overlap,
            evaluation=args.balance_evaluation,
            unit=args.balance_unit,
            unpad=args.balance_unpad,
            deterministic=bool(getattr(args, "deterministic_mode", False)),
            record=args.balance_record,
        )

    @property
    def active(self) -> bool:
        """True if a flag asks for balancing."""
        return self.use_dynamic_batch_size or self.balance_data

    @property
    def cost_name(self) -> str:
        """The cost at the start of the run: `tokens`, `flops` or `seconds`."""
        if not self.balance_by_flops:
            return "tokens"
        return "flops" if self.cost_file is None else "seconds"

    @property
    def policy(self) -> str:
        """The flags that chose the plans, for people."""
        flags = {
            "--use-dynamic-batch-size": self.use_dynamic_batch_size,
            "--balance-data": self.balance_data,
            f"--balance-context-parallel {self.max_cp_size or ''}".rstrip(): self.dynamic_cp,
            "--balance-by-flops": self.balance_by_flops,
            "--balance-cost": self.cost_file is not None,
            f"--balance-shape-bucket {self.shape_bucket}": self.shape_bucket > 1,
            f"--balance-objective {self.objective}": self.objective != "auto",
            f"--balance-algorithm {self.algorithm}": self.algorithm != "auto",
        }
        return " ".join(flag for flag, is_set in flags.items() if is_set)

    def limits(self, *, micro_batch_size: int, topology: Topology) -> Limits:
        """The limits of a micro-batch; the cap is rounded down, so that a bucket's padding stays below it.

        Raises:
            BalanceError: the bucket is larger than the cap.
        """
        if not self.use_dynamic_batch_size:
            return Limits(micro_batch_size=micro_batch_size)
        return bucketed_limits(
            Limits(self.max_tokens_per_gpu),
            topology=topology,
            shape_bucket=self.shape_bucket,
            flag="--balance-shape-bucket",
        )


def cost_model_from_megatron_args(args: Any, *, config: BalanceConfig) -> CostModel:
    """Tokens, the FLOPs of the model that the run's own arguments describe, or the seconds of --balance-cost."""
    return _costs_of_run(args, config=config).cost_model


def extrapolation_from_megatron_args(args: Any, *, config: BalanceConfig) -> str:
    """A notice where samples may be longer than those that --balance-cost was measured on; else empty."""
    if config.cost_file is None:
        return ""
    notice = Calibration.read(Path(config.cost_file)).extrapolation(args.seq_length)
    return f"--balance-cost {config.cost_file}: {notice}" if notice else ""


def exchange_source(args: Any, *, config: BalanceConfig) -> str | None:
    """The source of the cost of context-parallel exchange, for the log; None where all sizes are the same."""
    return _costs_of_run(args, config=config).source if config.dynamic_cp else None


def _costs_of_run(args: Any, *, config: BalanceConfig) -> ExchangeCost:
    if not config.balance_by_flops:
        return ExchangeCost(CostModel.tokens(), "not counted beside tokens: add --balance-by-flops")
    calibration = None
    if config.cost_file is not None:
        calibration = Calibration.read(Path(config.cost_file))
        # Where sizes differ, the planner shares a sample's cost among its context-parallel ranks itself.
        cp_size = 1 if config.dynamic_cp else args.context_parallel_size
        costs = calibration.cost_model(
            ep_size=args.expert_model_parallel_size,
            model_parallel_size=args.tensor_model_parallel_size * cp_size,
        )
    else:
        costs = getattr(args, "balance_cost_model", None) or flops_from_megatron_args(args)
    if not config.dynamic_cp:
        return ExchangeCost(replace(costs, cp_exchange=0), "")
    return exchange_cost(costs, args=args, max_cp_size=config.max_cp_size, calibration=calibration)


def attention_rate_of(args: Any) -> tuple[float, str]:
    """The rate of attention over that of all else that FLOPs are weighed by, and its reason."""
    given = getattr(args, "balance_attention_rate", None)
    if given is not None:
        return given, "--balance-attention-rate"
    has_experts, fp8 = bool(args.num_experts), bool(getattr(args, "fp8", None))
    kind, precision = "mixtures of experts" if has_experts else "dense models", "FP8" if fp8 else "bf16"
    rate = default_attention_rate(has_experts=has_experts, fp8=fp8)
    return rate, f"what loses least over published GPUs for {kind} in {precision}; --balance-attention-rate sets it"


def flops_from_megatron_args(args: Any) -> CostModel:
    """The FLOPs of the model that the run's own arguments describe, attention weighed by its rate."""
    cap = getattr(args, "max_tokens_per_gpu", None)
    return CostModel.from_shape(
        _shape_of_run(args),
        ep_size=args.expert_model_parallel_size,
        recompute=args.recompute_granularity == "full",
        microbatch_tokens=MICROBATCH_TOKENS,
        frozen_encoder=bool(getattr(args, "freeze_ViT", False)),
        frozen_language_model=bool(getattr(args, "freeze_LM", False)),
        pack_tokens=cap * args.context_parallel_size if isinstance(cap, int) else 0,
        attention_tflops=attention_rate_of(args)[0],
    )


def patch_values_from_megatron_args(args: Any, *, cost_model: CostModel) -> int:
    """Numbers of a patch of the model's vision encoder; 0 where images cost nothing or a patch's size is not known."""
    if not cost_model.image_linear or getattr(args, "balance_cost_model", None) is not None:
        return 0
    vision = _shape_of_run(args).vision
    return 0 if vision is None else vision.patch_values


def _shape_of_run(args: Any) -> ModelShape:
    return getattr(args, "balance_shape", None) or ModelShape.from_megatron_args(args)


def topology_from_megatron_args(args: Any) -> Topology:
    """The ranks of a run, from validated arguments.

    Raises:
        BalanceError: a recipe of FP8 or FP4 that is not known.
    """
    interleaved = args.virtual_pipeline_model_parallel_size is not None
    group_size = args.microbatch_group_size_per_vp_stage or args.pipeline_model_parallel_size
    return Topology(
        args.data_parallel_size,
        cp_size=args.context_parallel_size,
        tp_size=args.tensor_model_parallel_size,
        pp_size=args.pipeline_model_parallel_size,
        ep_size=args.expert_model_parallel_size,
        etp_size=args.expert_tensor_parallel_size or args.tensor_model_parallel_size,
        vpp_size=args.virtual_pipeline_model_parallel_size or 1,
        microbatch_multiple=group_size if interleaved else 1,
        sequence_parallel=bool(args.sequence_parallel),
        fully_sharded=bool(args.use_megatron_fsdp or args.use_torch_fsdp2),
        token_alignment=token_alignment(args),
        dynamic_cp=getattr(args, "balance_context_parallel", None) is not None,
        max_cp_size=_max_cp_size(args),
    )


def _max_cp_size(args: Any) -> int | None:
    limit = getattr(args, "balance_context_parallel", None)
    return None if limit == ALL_RANKS else limit
