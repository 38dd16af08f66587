"""Judges Megatron's options beside the balance flags: refuses some, warns of some; all others are harmless.

Rules (`rules.txt`) are applied right after parsing, before anything is initialised, and again on validated arguments,
which checkpoints and Megatron's validation may have changed; all ranks agree on the findings. The condition of a rule
is text: terms between spaces, all of which must hold.

| term | holds where |
|---|---|
| `name`, `a/b` | the option, or one of these, has a value that is neither empty nor false |
| `name=x,y` | its value is one of these; a list counts by its entries |
| `name>1`, `name<1` | its value, or the largest of a list, is a number above or below; 0 where it is not given |
| `engine<2.10` | layers are Transformer Engine's, and the release installed is older |
| `core<0.19`, `torch<2.10` | the release that is imported is older, or not known |
| `:name` | a condition of `_NAMED` holds |
| `!` before these | it does not |

Options are named as argparse stores them; one that a release lacks counts as not given.
"""

from __future__ import annotations

import re
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from importlib.resources import files
from typing import Any, NamedTuple

Options = Mapping[str, Any]
"""Megatron's options and the balance flags by the names under which argparse stores them, parsed or validated."""

FLAG_RULES = "Balance flags"
CAUTIONS, UNTRIED = "Cautions", "Not tried on a GPU"
"""Subjects of rules that are no refusals."""

TUNED_STEPS = 10
"""Steps that `auto` settings are found from."""


class Rule(NamedTuple):
    """A rule: the heading under which pages list it, its condition, and the reason with the remedy."""

    subject: str
    condition: str
    message: str


def problems(options: Options) -> list[str]:
    """All refusals of these options, parsed or validated; empty where they work together."""
    refused = {rule.subject for rule in RULES} - {CAUTIONS, UNTRIED}
    return messages(options, *([FLAG_RULES] if nothing_balances(options) else refused))


def cautions(args: Namespace | Options) -> list[str]:
    """Warnings about options that a run that balances may have.

    Args:
        args: Megatron's namespace with the balance flags, parsed or validated.
    """
    options = args if isinstance(args, Mapping) else vars(args)
    return [] if nothing_balances(options) else messages(options, CAUTIONS, UNTRIED)


def messages(options: Options, *subjects: str) -> list[str]:
    """For each rule of these subjects that applies: the options with the values seen, the reason and the remedy."""
    return [
        f"{_values_text(options, names=names_of(rule.condition))}: {rule.message}."
        for rule in RULES
        if rule.subject in subjects and holds(rule.condition, options)
    ]


def nothing_balances(options: Options) -> bool:
    """True if no balance flag is set."""
    return not (options.get("use_dynamic_batch_size") or options.get("balance_data"))


def autotuned(options: Options) -> tuple[int, tuple[str, ...]]:
    """The steps that `auto` settings are found in, and what is found; 0 for nothing."""
    match = re.fullmatch(r"auto(?::([1-9]\d*))?", str(options.get("balance_cost")))
    finds_cap = options.get("balance_auto_cap") and options.get("use_dynamic_batch_size")
    kinds = ("costs",) * bool(match) + ("cap",) * bool(finds_cap)
    kinds += ("speeds",) * bool(options.get("balance_rank_speeds"))
    return int((match and match[1]) or TUNED_STEPS) * bool(kinds), kinds


def holds(condition: str, options: Options) -> bool:
    """True if all terms of a condition hold."""
    return all(_holds(term.removeprefix("!"), options) is not term.startswith("!") for term in condition.split())


def names_of(condition: str) -> list[str]:
    """The options that a condition is about."""
    names: list[str] = []
    for term in condition.split():
        text = _TERM.split(term.removeprefix("!"))[0]
        if text.startswith(":"):
            names += _NAMED[text[1:]][0]
        elif text not in PACKAGES:
            names += text.split("/")
    return list(dict.fromkeys(names))


_TERM = re.compile("([=<>])")


def _holds(term: str, options: Options) -> bool:
    """A term without `!` holds."""
    if term.startswith(":"):
        return _NAMED[term[1:]][1](options)
    names, operator, value = [*_TERM.split(term), "", ""][:3]
    if names in PACKAGES:
        return _is_older(names, value, options)
    values = [options.get(name) for name in names.split("/")]
    entries = [entry for value in values for entry in (value if isinstance(value, list) else [value])]
    if operator == "=":
        return any(_text(entry) in value.split(",") for entry in entries)
    largest = max([entry for entry in entries if isinstance(entry, int | float)], default=0)
    if operator:
        return largest > float(value) if operator == ">" else largest < float(value)
    return any(entries)


PACKAGES = {"engine": "transformer-engine", "core": "megatron-core", "torch": "torch"}
"""Names of releases in conditions."""


def _is_older(name: str, oldest: str, options: Options) -> bool:
    def numbers(version: str) -> list[int]:
        return [int(number) for number in re.findall(r"\d+", version)[:2]]

    if sys.modules.get("torch") is None:  # no run: `compare` plans for another machine, and loads none of them
        return False
    from megatron_balance.runtime.process import version_of

    version = version_of(PACKAGES[name])
    if name == "engine" and (version is None or options.get("transformer_impl") != "transformer_engine"):
        return False  # Megatron itself misses the engine
    return version is None or numbers(version) < numbers(oldest)


def _values_text(options: Options, *, names: list[str]) -> str:
    """The options of a condition that are given, with their values: `--flag is value and --other-flag is set`."""
    given = [name for name in names if _is_given(options.get(name))] or names[:1]
    return " and ".join(f"{flag_of(name)} is {_value_text(options.get(name))}" for name in given)


def _is_given(value: Any) -> bool:
    return (bool(value) and value != "none") or (isinstance(value, int) and not isinstance(value, bool))


def _value_text(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return "set" if value else "not set"
    return " ".join(map(_text, value)) if isinstance(value, list | tuple) else _text(value)


def _text(value: Any) -> str:
    return str(getattr(value, "name", value))


def flag_of(name: str) -> str:
    """The flag that argparse stores under this name."""
    return {"fp8": "--fp8-format", "fp4": "--fp4-format"}.get(name, f"--{name.replace('_', '-')}")


def flag_text(name: str, value: object) -> str:
    """A flag and its value as they are typed."""
    return flag_of(name) if value is True else f"{flag_of(name)} {value}"


def _tp(options: Options) -> int:
    return options.get("tensor_model_parallel_size") or 1


def _etp(options: Options) -> int:
    return options.get("expert_tensor_parallel_size") or _tp(options)


def _layers(letter: str, variant: str = "") -> Callable[[Options], bool]:
    """A pattern of layers has this letter, or attention is this variant."""
    return lambda options: (
        any(options.get(name) == variant for name in _VARIANTS if variant)
        or any(letter in (options.get(name) or "") for name in _PATTERNS)
    )


_VARIANTS = ("experimental_attention_variant", "linear_attention_type")
_PATTERNS = ("hybrid_layer_pattern", "hybrid_override_pattern", "mtp_hybrid_override_pattern")
_SHARDS = ("tensor_parallel_num_weight_shards", "expert_tensor_parallel_num_weight_shards")

_NAMED: dict[str, tuple[tuple[str, ...], Callable[[Options], bool]]] = {
    "not_balanced": ((), nothing_balances),
    "context_parallel": (
        ("context_parallel_size", "balance_dynamic_cp"),
        lambda options: (options.get("context_parallel_size") or 1) > 1 or bool(options.get("balance_dynamic_cp")),
    ),
    "expert_tensors_span_replicas": (
        ("expert_tensor_parallel_size", "tensor_model_parallel_size"),
        lambda options: _etp(options) > _tp(options),
    ),
    "weights_are_sharded_over_data": (  # validation sets both to the tensor-parallel sizes, where not given
        _SHARDS,
        lambda options: (options.get(_SHARDS[0]) or 0) > _tp(options) or (options.get(_SHARDS[1]) or 0) > _etp(options),
    ),
    "delta_net": ((*_VARIANTS, *_PATTERNS), _layers("G", "gated_delta_net")),
    "mamba": (_PATTERNS, _layers("M")),
    "dsa": ((_VARIANTS[0], *_PATTERNS), _layers("D", "dsa")),
    "autotuned": (
        ("balance_cost", "max_tokens_per_gpu", "balance_rank_speeds"),
        lambda options: autotuned(options)[0] > 0,
    ),
}
"""Conditions that no terms say, and the options that they are about."""


def _rules() -> Iterator[Rule]:
    subject = ""
    for block in re.split(r"\n+(?=\S)", (files(__package__) / "rules.txt").read_text(encoding="utf-8")):
        first, *message = block.splitlines()
        if first.startswith("## "):
            subject = first[3:]
        elif not first.startswith("#"):
            yield Rule(subject, first, " ".join(map(str.strip, message)))


RULES = tuple(_rules())
"""All rules, for pages and for the check on Megatron's parsers."""
