"""Conditions of rules, read from text: terms between spaces, all of which must hold of Megatron's options.

| term | holds where |
|---|---|
| `name`, `a/b` | the option, or one of these, has a value that is neither empty nor false |
| `!name`, `!a/b` | it has none, or none of them has one |
| `name=x,y`, `name!=x,y` | its value is one of these, or none of these; a list counts by its entries |
| `name>1`, `a/b>1`, `name<1` | it is a number above, one of these is, or it is below or not given |
| `engine<2.10` | layers are Transformer Engine's, and the release installed is older |
| `core<0.19` | the release of Megatron Core installed is older |
| `:name` | a function of this file holds |

Options are named as argparse stores them; one that a release lacks counts as not given.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from importlib import metadata
from typing import Any

Options = Mapping[str, Any]
"""Megatron's options and the balance flags by the names under which argparse stores them."""

_FLAGS = {
    "fp8": "--fp8-format",
    "fp4": "--fp4-format",
    "use_gloo_process_groups": "--disable-gloo-process-groups",
    "use_mamba_mem_eff_path": "--disable-mamba-mem-eff-path",
    "create_attention_mask_in_dataloader": "--no-create-attention-mask-in-dataloader",
}
"""Flags that do not follow from the names by which argparse stores them."""


@dataclass(frozen=True)
class Term:
    """One term of a condition.

    Attributes:
        names: options that it is about, for messages.
        words: it in words, for people.
        holds: True for options, parsed or validated, of which it holds.
        absent: the options are those that are not given.
    """

    names: tuple[str, ...]
    words: str
    holds: Callable[[Options], bool]
    absent: bool = False


def parse(condition: str) -> tuple[Term, ...]:
    """The terms of a condition.

    Raises:
        ValueError: a term has no known form.
    """
    return tuple(map(_term, condition.split()))


def seen(args: Options, *, terms: tuple[Term, ...]) -> str:
    """The options of a condition with the values given: `--flag is value with --other-flag value`."""
    shown = [term for term in terms if term.names and not term.absent] or list(terms)
    names = list(dict.fromkeys(name for term in shown for name in term.names if name in args))
    first, *others = [name for name in names if _has_value(args[name])] or names[:1]
    return " with ".join([_is(first, args[first]), *(_given(name, args[name]) for name in others)])


def flag_of(name: str) -> str:
    """The flag of an option that argparse stores by this name."""
    return _FLAGS.get(name, f"--{name.replace('_', '-')}")


def nothing_balances(args: Options) -> bool:
    """No flag asks for balancing."""
    return not (_value(args, "use_dynamic_batch_size") or _value(args, "balance_data"))


def _term(text: str) -> Term:
    match = re.fullmatch(r"(!|:)?([\w/]+)(?:(!=|=|<|>)([\w.,+-]+))?", text)
    if match is None:
        raise ValueError(f"{text!r} is no term of a condition")
    sign, name, operator, value = match.groups()
    names = tuple(name.split("/"))
    shown = " or ".join(map(flag_of, names))
    if sign == ":":
        return _NAMED[name]
    if sign == "!":
        return Term(names, f"without {shown}", lambda args: not any(_value(args, one) for one in names), absent=True)
    if operator is None:
        return Term(names, shown, lambda args: any(_value(args, one) for one in names))
    if operator in ("=", "!="):
        values = value.split(",")
        words = " or ".join(one for one in values if one != "None")
        among = lambda args: any(_text(one) in values for one in _entries(args, name))  # noqa: E731
        if operator == "=":
            return Term(names, shown if value == "False" else f"{shown} {words}", among)
        return Term(names, f"{shown} other than {words}", lambda args: not among(args))
    if name in ("engine", "core"):
        return _release(name, value)
    limit = float(value)
    if operator == ">":
        return Term(names, f"{shown} above {value}", lambda args: any(_number(args, one) > limit for one in names))
    return Term(names, f"{shown} missing or below {value}", lambda args: _number(args, name) < limit)


def _release(package: str, oldest: str) -> Term:
    of_engine = package == "engine"
    distribution = "transformer-engine" if of_engine else "megatron-core"

    def holds(args: Options) -> bool:
        if of_engine and _value(args, "transformer_impl") != "transformer_engine":
            return False
        try:
            installed = metadata.version(distribution)
        except metadata.PackageNotFoundError:
            return False  # Megatron itself misses the engine; of a checkout, hooks check the version
        return _numbers(installed) < _numbers(oldest)

    return Term(("transformer_impl",) if of_engine else (), f"{distribution} before {oldest}", holds)


def _numbers(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version)[:2]]


def _value(args: Options, name: str) -> Any:
    return args.get(name)


def _entries(args: Options, name: str) -> list[Any]:
    value = _value(args, name)
    return value if isinstance(value, list) else [value]


def _number(args: Options, name: str) -> float:
    """The largest number of an option; 0 where it is not given or no number."""
    return max([one for one in _entries(args, name) if isinstance(one, int | float)], default=0)


def _text(value: Any) -> str:
    return str(getattr(value, "name", value))


def _has_value(value: Any) -> bool:
    return (bool(value) and value != "none") or (isinstance(value, int) and not isinstance(value, bool))


def _is(name: str, value: Any) -> str:
    flag = flag_of(name)
    if isinstance(value, bool) or value is None:
        is_set = value is not None and value is not flag.startswith(("--no-", "--disable-"))
        return f"{flag} is {'set' if is_set else 'not set'}"
    return f"{flag} is {_shown(value)}"


def _given(name: str, value: Any) -> str:
    return flag_of(name) if isinstance(value, bool) else f"{flag_of(name)} {_shown(value)}"


def _shown(value: Any) -> str:
    if isinstance(value, list | tuple):
        return " ".join(map(_shown, value))
    return value.name if isinstance(value, Enum) else str(value)


def _size(args: Options, name: str, *, default: int = 1) -> int:
    """A number of ranks; the default where the option is missing, or the namespace is not Megatron's."""
    return _value(args, name) or default


def _tp(args: Options) -> int:
    return _size(args, "tensor_model_parallel_size")


def _etp(args: Options) -> int:
    return _size(args, "expert_tensor_parallel_size", default=_tp(args))


def _spans_replicas(args: Options, *, group_size: int) -> bool:
    """Megatron forms expert groups of consecutive ranks; `tp*cp` consecutive ranks share a micro-batch."""
    return bool(_value(args, "num_experts")) and _tp(args) * _size(args, "context_parallel_size") % group_size != 0


def _group_of_experts(args: Options) -> int:
    return _etp(args) * _size(args, "expert_model_parallel_size")


def _weights_are_sharded_over_data(args: Options) -> bool:
    """Validation sets both numbers of shards to the tensor-parallel sizes, where they are not given."""
    of_weights = _size(args, "tensor_parallel_num_weight_shards", default=_tp(args))
    of_experts = _size(args, "expert_tensor_parallel_num_weight_shards", default=_etp(args))
    return of_weights > _tp(args) or of_experts > _etp(args)


def _bucket_is_over_the_cap(args: Options) -> bool:
    cap = args["max_tokens_per_gpu"]
    return cap is not None and args["balance_shape_bucket"] > max(cap, 1)


def _bucket_splits_unevenly(args: Options) -> bool:
    bucket = _value(args, "balance_shape_bucket") or 1
    return bucket > 1 and bucket % (2 * _tp(args)) != 0


def _layers(letter: str, variant: str = "") -> Callable[[Options], bool]:
    """A pattern of layers has this letter, or attention is this variant."""
    return lambda args: (
        any(_value(args, name) == variant for name in _VARIANTS if variant)
        or any(letter in (_value(args, name) or "") for name in _PATTERNS)
    )


_VARIANTS = ("experimental_attention_variant", "linear_attention_type")
_PATTERNS = ("hybrid_layer_pattern", "hybrid_override_pattern", "mtp_hybrid_override_pattern")

_NAMED = {
    "stock": Term((), "without --balance-data or --use-dynamic-batch-size", nothing_balances),
    "unpads": Term(
        ("balance_unpad",), "--balance-unpad", lambda args: _value(args, "balance_unpad") is not None
    ),  # 0 is a token id
    "bucket_over_cap": Term(
        ("balance_shape_bucket", "max_tokens_per_gpu"),
        "--balance-shape-bucket above --max-tokens-per-gpu",
        _bucket_is_over_the_cap,
    ),
    "bucket_splits_unevenly": Term(
        ("balance_shape_bucket",),
        "--balance-shape-bucket no multiple of 2 * --tensor-model-parallel-size",
        _bucket_splits_unevenly,
    ),
    "aux_loss": Term(
        ("moe_aux_loss_coeff",),
        "--moe-aux-loss-coeff above 0",
        lambda args: bool(_value(args, "num_experts")) and _number(args, "moe_aux_loss_coeff") > 0,
    ),
    "experts_span_replicas": Term(
        ("expert_model_parallel_size",),
        "experts spread over ranks that hold different micro-batches",
        lambda args: _spans_replicas(args, group_size=_group_of_experts(args)),
    ),
    "experts_span_ranks": Term(
        ("expert_model_parallel_size",),
        "experts spread over more ranks than share every token (tensor-parallel ones)",
        lambda args: bool(_value(args, "num_experts")) and _tp(args) % _group_of_experts(args) != 0,
    ),
    "expert_tensors_span_replicas": Term(
        ("expert_tensor_parallel_size", "tensor_model_parallel_size"),
        "--expert-tensor-parallel-size above --tensor-model-parallel-size, over ranks of different micro-batches",
        lambda args: _spans_replicas(args, group_size=_etp(args)),
    ),
    "weights_are_sharded_over_data": Term(
        ("tensor_parallel_num_weight_shards", "expert_tensor_parallel_num_weight_shards"),
        "--tensor-parallel-num-weight-shards or --expert-tensor-parallel-num-weight-shards above the tensor-parallel "
        "size",
        _weights_are_sharded_over_data,
    ),
    "delta_net": Term((*_VARIANTS, *_PATTERNS), "gated_delta_net", _layers("G", "gated_delta_net")),
    "mamba": Term(_PATTERNS, "--hybrid-layer-pattern with Mamba layers", _layers("M")),
    "dsa": Term((_VARIANTS[0], *_PATTERNS), "--experimental-attention-variant dsa", _layers("D", "dsa")),
    "stock_evaluation": Term(
        (),
        "evaluated as by stock (--no-balance-evaluation, or --balance-context-parallel)",
        lambda args: args["balance_evaluation"] is False or args["balance_context_parallel"] is not None,
    ),
    "every_stage_loads": Term(
        (),
        "stages in between load (--balance-load-every-stage, or --mtp-num-layers with "
        "--pipeline-model-parallel-layout)",
        lambda args: bool(
            _value(args, "balance_load_every_stage")
            or (_value(args, "mtp_num_layers") and _value(args, "pipeline_model_parallel_layout"))
        ),
    ),
}
