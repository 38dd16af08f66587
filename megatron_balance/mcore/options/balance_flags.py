"""Options of balancing: combinations of balance flags that cannot work are refused in every run."""

from __future__ import annotations

from typing import Any

from megatron_balance.mcore.options.conditions import BALANCING, above, both, given, negated, unpads
from megatron_balance.mcore.options.dynamic_cp import DYNAMIC_CP_FLAGS
from megatron_balance.mcore.options.option import Option, Support


def _has_no_cap(args: Any) -> bool:
    return (args.max_tokens_per_gpu or 0) < 1


def _bucket_is_over_the_cap(args: Any) -> bool:
    cap = args.max_tokens_per_gpu
    return cap is not None and args.balance_shape_bucket > max(cap, 1)


def _has_cp_sizes(args: Any) -> bool:
    return args.balance_context_parallel is not None


def _limits_cp_size(args: Any) -> bool:
    return isinstance(args.balance_context_parallel, int)


BALANCE_FLAGS = (
    Option(
        names=("balance_record",),
        case="without --balance-data or --use-dynamic-batch-size",
        support=Support.REFUSED,
        when=both(given("balance_record"), negated(BALANCING)),
        because="nothing is balanced, so no lengths are known",
        remedy="add --balance-data or --use-dynamic-batch-size, or drop it",
    ),
    Option(
        names=("balance_unpad",),
        case="without --balance-data or --use-dynamic-batch-size",
        support=Support.REFUSED,
        when=both(unpads, negated(BALANCING)),
        because="nothing is balanced, and rows stay padded",
        remedy="add --use-dynamic-batch-size and --max-tokens-per-gpu, or drop it",
    ),
    Option(
        names=("balance_by_flops",),
        case="without --use-dynamic-batch-size",
        support=Support.REFUSED,
        when=both(given("balance_by_flops"), negated(given("use_dynamic_batch_size"))),
        because="without --use-dynamic-batch-size there is nothing to pack",
        remedy="add --use-dynamic-batch-size and --max-tokens-per-gpu, or drop it",
    ),
    Option(
        names=("balance_evaluation",),
        case="without --balance-data or --use-dynamic-batch-size",
        support=Support.REFUSED,
        when=both(given("balance_evaluation"), negated(BALANCING)),
        because="nothing is balanced",
        remedy="add --balance-data or --use-dynamic-batch-size, or drop it",
    ),
    Option(
        names=("balance_evaluation", "balance_context_parallel"),
        case="with --balance-context-parallel",
        support=Support.REFUSED,
        when=both(given("balance_evaluation"), _has_cp_sizes),
        because="evaluation runs at --context-parallel-size",
        remedy="drop one of them",
    ),
    *(
        Option(
            names=(name,),
            case="without --balance-by-flops",
            support=Support.REFUSED,
            when=both(given(name), negated(given("balance_by_flops"))),
            because="it refines --balance-by-flops, which is not set",
            remedy="add that, or drop it",
        )
        for name in ("balance_cost",)
    ),
    Option(
        names=("balance_context_parallel",),
        case="without --balance-data and --use-dynamic-batch-size",
        support=Support.REFUSED,
        when=both(_has_cp_sizes, negated(both(given("balance_data"), given("use_dynamic_batch_size")))),
        because="samples must move to the ranks that share them, in micro-batches of a number of tokens",
        remedy="add them, and --max-tokens-per-gpu, or drop it",
    ),
    Option(
        names=("balance_context_parallel",),
        case="below 1",
        support=Support.REFUSED,
        when=both(_limits_cp_size, negated(above("balance_context_parallel", 0))),
        because="it counts ranks",
        remedy="set a power of two, or give no number for all ranks",
    ),
    *DYNAMIC_CP_FLAGS,
    Option(
        names=("max_tokens_per_gpu",),
        case="missing or below 1",
        support=Support.REFUSED,
        when=both(given("use_dynamic_batch_size"), _has_no_cap),
        because="with --use-dynamic-batch-size it must be above 0",
        remedy="give the most tokens that fit a GPU's memory, --seq-length for a start",
    ),
    Option(
        names=("balance_shape_bucket",),
        case="below 1",
        support=Support.REFUSED,
        when=negated(above("balance_shape_bucket", 0)),
        because="it counts tokens",
        remedy="set 1 (off) or more",
    ),
    Option(
        names=("balance_shape_bucket",),
        case="above 1, without --balance-data or --use-dynamic-batch-size",
        support=Support.REFUSED,
        when=both(above("balance_shape_bucket", 1), negated(BALANCING)),
        because="nothing is balanced",
        remedy="add --use-dynamic-batch-size or --balance-data, or drop it",
    ),
    Option(
        names=("balance_shape_bucket", "max_tokens_per_gpu"),
        case="above --max-tokens-per-gpu",
        support=Support.REFUSED,
        when=_bucket_is_over_the_cap,
        because="a micro-batch would be padded over the cap",
        remedy="set a bucket of a sixteenth of the cap or less",
    ),
)
