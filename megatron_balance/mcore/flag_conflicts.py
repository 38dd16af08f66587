"""Flags that cannot work together, in two tables: what is refused, and where a run stays stock.

Rules are looked at in their order, on parsed arguments that Megatron need not have validated yet.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron_balance.mcore.arguments import BalanceConfig


@dataclass(frozen=True)
class FlagRule:
    """One rule.

    Attributes:
        says: the rule in general, for people who have not met it.
        broken_by: from the balance flags and Megatron's namespace: what is wrong and its remedy, or None.
    """

    says: str
    broken_by: Callable[[BalanceConfig, Any], str | None]


def _lookahead_is_positive(config: BalanceConfig, args: Any) -> str | None:
    if config.lookahead >= 1:
        return None
    return f"--balance-lookahead is {config.lookahead}: it must be 1 (off) or more global batches."


def _lookahead_balances(config: BalanceConfig, args: Any) -> str | None:
    if config.lookahead <= 1 or config.active:
        return None
    return f"--balance-lookahead is {config.lookahead} and nothing is balanced: add --balance-data or set 1."


def _lookahead_has_one_batch_size(config: BalanceConfig, args: Any) -> str | None:
    if config.lookahead <= 1:
        return None
    for flag in ("rampup_batch_size", "step_batch_size_schedule"):
        value = getattr(args, flag, None)
        if value:
            return (
                f"--{flag.replace('_', '-')} is {value} with --balance-lookahead {config.lookahead}, which chooses "
                "among global batches of one size: set --balance-lookahead 1 until the batch has grown."
            )
    return None


def _lookahead_is_saved(config: BalanceConfig, args: Any) -> str | None:
    interval = getattr(args, "non_persistent_save_interval", None)
    if config.lookahead <= 1 or not interval:
        return None
    return (
        f"--non-persistent-save-interval is {interval} with --balance-lookahead {config.lookahead}, whose samples that "
        "wait go with persistent checkpoints alone: a run resumed from another would skip them. Use --save-interval, "
        "or set --balance-lookahead 1."
    )


def _loader_has_no_state(config: BalanceConfig, args: Any) -> str | None:
    folder = getattr(args, "dataloader_save", None)
    if not config.active or not folder:
        return None
    return (
        f"--dataloader-save is {folder}: balancing pulls the next step's items ahead, which the loader's own state "
        "would count as trained, and a resumed run would skip them. Drop it, or the balance flags."
    )


def _record_balances(config: BalanceConfig, args: Any) -> str | None:
    if config.record is None or config.active:
        return None
    return (
        f"--balance-record is {config.record} and nothing is balanced, so no lengths are known: add --balance-data or "
        "--use-dynamic-batch-size, or drop it."
    )


def _flops_pack(config: BalanceConfig, args: Any) -> str | None:
    if not config.balance_by_flops or config.use_dynamic_batch_size:
        return None
    return (
        "--balance-by-flops is set without --use-dynamic-batch-size: add --use-dynamic-batch-size and "
        "--max-tokens-per-gpu, or drop --balance-by-flops."
    )


def _calibration_refines(config: BalanceConfig, args: Any) -> str | None:
    for flag, value in (
        ("--balance-calibration", config.calibration),
        ("--balance-calibrate-online", config.calibrate_online),
    ):
        if value and not config.balance_by_flops:
            return f"{flag} is set without --balance-by-flops, which it refines: add that, or drop it."
    return None


def _passes_are_apart(config: BalanceConfig, args: Any) -> str | None:
    if not config.calibrate_online or not getattr(args, "overlap_moe_expert_parallel_comm", False):
        return None
    return (
        "--balance-calibrate-online is set with --overlap-moe-expert-parallel-comm, under which forward and "
        "backward passes of micro-batches run together and cannot be told apart: use --balance-calibration."
    )


def _there_is_a_cap(config: BalanceConfig, args: Any) -> str | None:
    if not config.use_dynamic_batch_size or config.auto_cap or (config.max_tokens_per_gpu or 0) >= 1:
        return None
    return (
        f"--use-dynamic-batch-size needs --max-tokens-per-gpu above 0, and it is {config.max_tokens_per_gpu}: "
        "give the most tokens that fit a GPU's memory, --seq-length for a start, or auto."
    )


def _budget_is_used(config: BalanceConfig, args: Any) -> str | None:
    if config.memory_gib is None:
        return None
    if not config.auto_cap:
        return (
            f"--balance-memory-gib is {config.memory_gib:g} and --max-tokens-per-gpu is not auto, so nothing follows "
            "from it: set --max-tokens-per-gpu auto, or drop it."
        )
    if not 0 < config.memory_gib < float("inf"):
        return f"--balance-memory-gib is {config.memory_gib:g}: it must be a positive number of GiB."
    return None


def _bucket_fits(config: BalanceConfig, args: Any) -> str | None:
    if config.shape_bucket < 1:
        return f"--balance-shape-bucket is {config.shape_bucket}: it must be 1 (off) or more tokens."
    if config.shape_bucket > 1 and not config.active:
        return (
            f"--balance-shape-bucket is {config.shape_bucket} and nothing is balanced: add --use-dynamic-batch-size or "
            "--balance-data, or drop it."
        )
    if config.max_tokens_per_gpu is not None and config.shape_bucket > max(config.max_tokens_per_gpu, 1):
        return (
            f"--balance-shape-bucket is {config.shape_bucket}, above --max-tokens-per-gpu {config.max_tokens_per_gpu}: "
            "a micro-batch would be padded over the cap; set a bucket of a sixteenth of the cap or less."
        )
    return None


def _loss_is_per_token(config: BalanceConfig, args: Any) -> str | None:
    if not config.active or args.calculate_per_token_loss:
        return None
    return (
        "--calculate-per-token-loss is not set, and balancing changes which samples share a micro-batch: add "
        "--calculate-per-token-loss, without which loss and gradients would depend on it."
    )


REFUSED = (
    FlagRule("--balance-lookahead is 1 or more", _lookahead_is_positive),
    FlagRule("--balance-lookahead above 1 needs --balance-data or --use-dynamic-batch-size", _lookahead_balances),
    FlagRule(
        "--balance-lookahead above 1 excludes --rampup-batch-size and --step-batch-size-schedule",
        _lookahead_has_one_batch_size,
    ),
    FlagRule("--balance-lookahead above 1 excludes --non-persistent-save-interval", _lookahead_is_saved),
    FlagRule(
        "every balance flag excludes --dataloader-save (of scripts with loaders that save a state)",
        _loader_has_no_state,
    ),
    FlagRule("--balance-record needs --balance-data or --use-dynamic-batch-size", _record_balances),
    FlagRule("--balance-by-flops needs --use-dynamic-batch-size", _flops_pack),
    FlagRule("--balance-calibration and --balance-calibrate-online need --balance-by-flops", _calibration_refines),
    FlagRule("--balance-calibrate-online excludes --overlap-moe-expert-parallel-comm", _passes_are_apart),
    FlagRule("--use-dynamic-batch-size needs --max-tokens-per-gpu above 0, or auto", _there_is_a_cap),
    FlagRule("--balance-memory-gib needs --max-tokens-per-gpu auto", _budget_is_used),
    FlagRule("--balance-shape-bucket needs a balance flag, and is at most --max-tokens-per-gpu", _bucket_fits),
    FlagRule("every balance flag needs --calculate-per-token-loss", _loss_is_per_token),
)
"""Broken ones end the run before anything is initialised."""


def _shapes_are_free(config: BalanceConfig, args: Any) -> str | None:
    graphs = getattr(args, "cuda_graph_impl", "none") != "none"
    if graphs or getattr(args, "enable_cuda_graph", False) or getattr(args, "external_cuda_graph", False):
        return "CUDA graphs replay fixed shapes (--cuda-graph-impl), and balanced micro-batches differ in length"
    return None


def _no_other_scheduler(config: BalanceConfig, args: Any) -> str | None:
    if getattr(args, "hybrid_context_parallel", False):
        return "--hybrid-context-parallel has a scheduler of its own"
    return None


STOCK = (
    FlagRule("under --cuda-graph-impl a run stays stock", _shapes_are_free),
    FlagRule("under --hybrid-context-parallel a run stays stock", _no_other_scheduler),
)
"""Broken ones are warned of once, and the run is not balanced."""


def problems(config: BalanceConfig, *, args: Any) -> list[str]:
    """Everything that is refused about these flags; empty where they work together.

    Args:
        config: the balance flags.
        args: Megatron's namespace, parsed.
    """
    return [problem for rule in REFUSED if (problem := rule.broken_by(config, args)) is not None]


def why_stock(config: BalanceConfig, *, args: Any) -> str | None:
    """Why a run with balance flags must stay as it is, or None.

    Args:
        config: the balance flags.
        args: Megatron's namespace, parsed.
    """
    return next((reason for rule in STOCK if (reason := rule.broken_by(config, args)) is not None), None)
