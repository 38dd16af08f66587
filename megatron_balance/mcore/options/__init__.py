"""Judges Megatron's options: refuses some, leaves a run stock for some, warns of some; all others are harmless.

Rules (`rules.py`) are applied right after parsing, before anything is initialised, and again on validated arguments,
which checkpoints and Megatron's validation may have changed; all ranks agree on the findings. The condition of a rule
is text: terms between spaces, all of which must hold.

| term | holds where |
|---|---|
| `name`, `a/b` | the option, or one of these, has a value that is neither empty nor false |
| `!name`, `!a/b` | it has none, or none of them has one |
| `name=x,y`, `name!=x,y` | its value is one of these, or none of these; a list counts by its entries |
| `name>1`, `a/b>1`, `name<1` | it is a number above, one of these is, or it is below or not given |
| `engine<2.10` | layers are Transformer Engine's, and the release installed is older |
| `core<0.19` | the release of Megatron Core installed is older |
| `:name` | a condition of `_NAMED` holds |

Options are named as argparse stores them; one that a release lacks counts as not given.
"""

from __future__ import annotations

import contextlib
import re
from argparse import Namespace
from collections.abc import Callable, Mapping
from importlib import metadata
from typing import Any, NamedTuple

from megatron_balance.mcore.options.rules import BALANCE_FLAGS, CAUTIONS, REFUSED, STOCK, UNTRIED

Options = Mapping[str, Any]
"""Megatron's options and the balance flags by the names under which argparse stores them, parsed or validated."""


class Term(NamedTuple):
    """One term: the options that it is about, it in words, and when it holds."""

    names: tuple[str, ...]
    words: str
    holds: Callable[[Options], bool]


class Rule(NamedTuple):
    """A rule: the heading under which pages list it, the terms that must all hold, and the reason with the remedy."""

    subject: str
    terms: tuple[Term, ...]
    says: str

    @property
    def words(self) -> str:
        """The condition in words."""
        return ", ".join(term.words for term in self.terms)

    @property
    def names(self) -> set[str]:
        """Megatron's options that it is about."""
        ours = ("balance_", "use_dynamic_batch_size", "max_tokens_per_gpu")
        return {name for term in self.terms for name in term.names if not name.startswith(ours)}


def problems(options: Options) -> list[str]:
    """All refusals of these options, parsed or validated; empty where they work together."""
    return _messages(options, _OF_FLAGS, *(() if nothing_balances(options) else REFUSED))


def why_stock(args: Namespace | Options) -> str | None:
    """The reason why a run with balance flags must stay stock, or None.

    Args:
        args: Megatron's namespace with the balance flags, parsed or validated.
    """
    return next(iter(_of_balanced(args, "Stock")), None)


def cautions(args: Namespace | Options, *, untried: bool = True) -> list[str]:
    """Warnings about options that a run that balances may have.

    Args:
        args: Megatron's namespace with the balance flags, parsed or validated.
        untried: warn also of what no test has run on a GPU.
    """
    return _of_balanced(args, _CAUTIONS, *([_UNTRIED] if untried else []))


def _of_balanced(args: Namespace | Options, *subjects: str) -> list[str]:
    options = args if isinstance(args, Mapping) else vars(args)
    return [] if nothing_balances(options) else _messages(options, *subjects)


def dynamic_cp_problem(options: Options) -> str | None:
    """The first refusal of `--balance-context-parallel` with a model; None where there is none."""
    return next(iter(_messages(options, "Context parallelism of each micro-batch")), None)


def executor_runs_our_plan(options: Options) -> bool:
    """True if dev's executor of dynamic context parallelism runs this package's plan."""
    return bool(options.get("dynamic_context_parallel") and options.get("balance_data"))


def stock_notice(options: Options, *, reason: str) -> str:
    """The log line of a run that stays stock for a reason from `why_stock`."""
    if executor_runs_our_plan(options):
        return f"Megatron's own executor runs this package's plan. {reason}"
    return f"training continues without balancing. {reason}"


def nothing_balances(options: Options) -> bool:
    """No flag asks for balancing."""
    return not (options.get("use_dynamic_batch_size") or options.get("balance_data"))


def _messages(options: Options, *subjects: str) -> list[str]:
    """For each rule of these subjects that applies: the options with the values seen, the reason and the remedy."""
    return [
        f"{_seen(options, terms=rule.terms)}: {rule.says}."
        for rule in RULES
        if rule.subject in subjects and all(term.holds(options) for term in rule.terms)
    ]


def _seen(options: Options, *, terms: tuple[Term, ...]) -> str:
    """The options of a condition with the values given: `--flag is value with --other-flag value`."""
    names = list(dict.fromkeys(name for term in terms for name in term.names if name in options))
    first, *others = [name for name in names if _is_given(options[name])] or names[:1]
    value, flag = options[first], _flag_of(first)
    if isinstance(value, bool) or value is None:
        is_set = value is not None and value is not flag.startswith(("--no-", "--disable-"))
        value = "set" if is_set else "not set"
    rest = [f" with {_flag_of(name)} {'' if options[name] is True else _shown(options[name])}" for name in others]
    return f"{flag} is {_shown(value)}" + "".join(rest).rstrip()


_FLAGS = {
    "fp8": "--fp8-format",
    "fp4": "--fp4-format",
    "use_gloo_process_groups": "--disable-gloo-process-groups",
    "use_mamba_mem_eff_path": "--disable-mamba-mem-eff-path",
    "create_attention_mask_in_dataloader": "--no-create-attention-mask-in-dataloader",
}
"""Flags that do not follow from the names by which argparse stores them."""

_DISTRIBUTIONS = {"engine": "transformer-engine", "core": "megatron-core"}


def _term(text: str) -> Term:
    match = re.fullmatch(r"(!|:)?([\w/]+)(?:(!=|=|<|>)([\w.,+-]+))?", text)
    assert match is not None, f"{text} is no term"
    sign, name, operator, value = match.groups()
    if sign == ":":
        return _NAMED[name]
    if name in _DISTRIBUTIONS:
        return _release(name, value)
    names, values = tuple(name.split("/")), (value or "").split(",")
    flags, listed = " or ".join(map(_flag_of, names)), " or ".join(one for one in values if one != "None")
    words, holds = {
        "!": (f"without {flags}", lambda options: not any(map(options.get, names))),
        None: (flags, lambda options: any(map(options.get, names))),
        "=": (flags if value == "False" else f"{flags} {listed}", lambda options: _among(options, name, values)),
        "!=": (f"{flags} other than {listed}" if listed else flags, lambda options: not _among(options, name, values)),
        ">": (f"{flags} above {value}", lambda options: any(_number(options, one) > float(value) for one in names)),
        "<": (f"{flags} missing or below {value}", lambda options: _number(options, name) < float(value)),
    }[sign or operator]
    return Term(names, words, holds)


def _release(package: str, oldest: str) -> Term:
    distribution, names = _DISTRIBUTIONS[package], ("transformer_impl",) if package == "engine" else ()

    def numbers(version: str) -> list[int]:
        return [int(number) for number in re.findall(r"\d+", version)[:2]]

    def holds(options: Options) -> bool:
        # Megatron itself misses the engine; of a checkout, hooks check the version.
        with contextlib.suppress(metadata.PackageNotFoundError):
            applies = not names or options.get(names[0]) == "transformer_engine"
            return applies and numbers(metadata.version(distribution)) < numbers(oldest)
        return False

    return Term(names, f"{distribution} before {oldest}", holds)


def _flag_of(name: str) -> str:
    return _FLAGS.get(name, f"--{name.replace('_', '-')}")


def _entries(options: Options, name: str) -> list[Any]:
    value = options.get(name)
    return value if isinstance(value, list) else [value]


def _among(options: Options, name: str, values: list[str]) -> bool:
    return any(str(getattr(one, "name", one)) in values for one in _entries(options, name))


def _number(options: Options, name: str) -> float:
    """The largest number of an option; 0 where it is not given or no number."""
    return max([one for one in _entries(options, name) if isinstance(one, int | float)], default=0)


def _is_given(value: Any) -> bool:
    return (bool(value) and value != "none") or (isinstance(value, int) and not isinstance(value, bool))


def _shown(value: Any) -> str:
    return " ".join(map(_shown, value)) if isinstance(value, list | tuple) else str(getattr(value, "name", value))


def _tp(options: Options) -> int:
    return options.get("tensor_model_parallel_size") or 1


def _etp(options: Options) -> int:
    return options.get("expert_tensor_parallel_size") or _tp(options)


def _spans(options: Options, *, experts: bool = True, cp_size: int = 0) -> bool:
    """A group of experts, or of the tensor-parallel ranks of one, has ranks that hold different micro-batches.

    Megatron forms expert groups of consecutive ranks; `tp*cp` consecutive ranks share a micro-batch.
    """
    group_size = _etp(options) * ((options.get("expert_model_parallel_size") or 1) if experts else 1)
    cp_size = cp_size or options.get("context_parallel_size") or 1
    return bool(options.get("num_experts")) and _tp(options) * cp_size % group_size != 0


def _layers(letter: str, variant: str = "") -> Callable[[Options], bool]:
    """A pattern of layers has this letter, or attention is this variant."""
    return lambda options: (
        any(options.get(name) == variant for name in _VARIANTS if variant)
        or any(letter in (options.get(name) or "") for name in _PATTERNS)
    )


_VARIANTS = ("experimental_attention_variant", "linear_attention_type")
_PATTERNS = ("hybrid_layer_pattern", "hybrid_override_pattern", "mtp_hybrid_override_pattern")
_SHARDS = ("tensor_parallel_num_weight_shards", "expert_tensor_parallel_num_weight_shards")

_NAMED = {
    "stock": Term((), "without --balance-data or --use-dynamic-batch-size", nothing_balances),
    "bucket_splits_unevenly": Term(
        ("balance_shape_bucket",),
        "--balance-shape-bucket no multiple of 2 * --tensor-model-parallel-size",
        lambda options: (
            _number(options, "balance_shape_bucket") > 1 and options["balance_shape_bucket"] % (2 * _tp(options)) != 0
        ),
    ),
    "experts_span_replicas": Term(
        ("expert_model_parallel_size",),
        "experts spread over ranks that hold different micro-batches",
        _spans,
    ),
    "experts_span_ranks": Term(
        ("expert_model_parallel_size",),
        "experts spread over more ranks than share every token (tensor-parallel ones)",
        lambda options: _spans(options, cp_size=1),
    ),
    "expert_tensors_span_replicas": Term(
        ("expert_tensor_parallel_size", "tensor_model_parallel_size"),
        "--expert-tensor-parallel-size above --tensor-model-parallel-size, over ranks of different micro-batches",
        lambda options: _spans(options, experts=False),
    ),
    "weights_are_sharded_over_data": Term(  # validation sets both to the tensor-parallel sizes, where not given
        _SHARDS,
        "--tensor-parallel-num-weight-shards or --expert-tensor-parallel-num-weight-shards above the tensor-parallel "
        "size",
        lambda options: _number(options, _SHARDS[0]) > _tp(options) or _number(options, _SHARDS[1]) > _etp(options),
    ),
    "delta_net": Term((*_VARIANTS, *_PATTERNS), "gated_delta_net", _layers("G", "gated_delta_net")),
    "mamba": Term(_PATTERNS, "--hybrid-layer-pattern with Mamba layers", _layers("M")),
    "dsa": Term((_VARIANTS[0], *_PATTERNS), "--experimental-attention-variant dsa", _layers("D", "dsa")),
    "stock_evaluation": Term(
        (),
        "evaluated as by stock (--no-balance-evaluation, or --balance-context-parallel)",
        lambda options: options["balance_evaluation"] is False or options["balance_context_parallel"] is not None,
    ),
}

_OF_FLAGS, _CAUTIONS, _UNTRIED = "Balance flags", "Cautions", "Not tried on a GPU"
_TABLES = {_OF_FLAGS: BALANCE_FLAGS, **REFUSED, "Stock": STOCK, _CAUTIONS: CAUTIONS, _UNTRIED: UNTRIED}

RULES = tuple(
    Rule(subject, tuple(map(_term, where.split())), says)
    for subject, rules in _TABLES.items()
    for where, says in rules.items()
)
"""All rules, for pages and for the check on Megatron's parsers."""
