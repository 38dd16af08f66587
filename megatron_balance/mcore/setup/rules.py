"""Judges Megatron's options beside the balance flags: refuses some, warns of some; all others are harmless.

Rules (`rules.txt`) are applied right after parsing, before anything is initialised, and again on validated arguments,
which checkpoints and Megatron's validation may have changed; all ranks agree on the findings. The condition of a rule
is text: terms between spaces, all of which must hold.

| term | holds where |
|---|---|
| `name`, `a/b` | the option, or one of these, has a value that is neither empty nor false |
| `!name`, `!a/b` | it has none, or none of them has one |
| `name=x,y`, `name!=x,y` | its value is one of these, or none of these; a list counts by its entries |
| `name>1`, `name<1` | its value, or the largest of a list, is a number above or below; 0 where it is not given |
| `engine<2.10` | layers are Transformer Engine's, and the release installed is older |
| `core<0.19`, `torch<2.10` | the release that is imported is older, or not known |
| `:name`, `!:name` | a condition of `_NAMED` holds, or does not |

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

FLAG_RULES, DYNAMIC_CP = "Balance flags", "Context parallelism of each micro-batch"
CAUTIONS, UNTRIED = "Cautions", "Not tried on a GPU"
"""Subjects of rules that are no refusals."""


TUNED_STEPS = 10
"""Steps that `auto` settings are found from."""


class Term(NamedTuple):
    """One term: the options that it is about, it as pages show it, and when it holds."""

    names: tuple[str, ...]
    words: str
    holds: Callable[[Options], bool]


class Rule(NamedTuple):
    """A rule: the heading under which pages list it, the terms that must all hold, and the reason with the remedy."""

    subject: str
    terms: tuple[Term, ...]
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


def dynamic_cp_problem(options: Options) -> str | None:
    """The first refusal of `--balance-dynamic-cp` with a model; None where there is none."""
    return next(iter(messages(options, DYNAMIC_CP)), None)


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
    return all(term.holds(options) for term in map(_term, condition.split()))


def messages(options: Options, *subjects: str) -> list[str]:
    """For each rule of these subjects that applies: the options with the values seen, the reason and the remedy."""
    return [
        f"{_values_text(options, terms=rule.terms)}: {rule.message}."
        for rule in RULES
        if rule.subject in subjects and all(term.holds(options) for term in rule.terms)
    ]


def _values_text(options: Options, *, terms: tuple[Term, ...]) -> str:
    """The options of a condition with their values: `--flag is value with --other-flag value`."""
    names = list(dict.fromkeys(name for term in terms for name in term.names))
    first, *further = [name for name in names if _is_given(options.get(name))] or names[:1]
    value, flag = options.get(first), _flag_of(first)
    if isinstance(value, bool) or value is None:
        is_set = value is not None and value is not flag.startswith(("--no-", "--disable-"))
        value = "set" if is_set else "not set"
    suffixes = [f" with {_flag_of(name)} {'' if options[name] is True else _text(options[name])}" for name in further]
    return f"{flag} is {_text(value)}" + "".join(suffixes).rstrip()


_FLAGS = {
    "fp8": "--fp8-format",
    "fp4": "--fp4-format",
    "use_gloo_process_groups": "--disable-gloo-process-groups",
    "use_mamba_mem_eff_path": "--disable-mamba-mem-eff-path",
    "create_attention_mask_in_dataloader": "--no-create-attention-mask-in-dataloader",
    "engine": "transformer-engine",
    "core": "megatron-core",
    "torch": "torch",
}
"""Names on the command line that do not follow from those by which argparse stores them, and of releases."""


def _term(text: str) -> Term:
    match = re.fullmatch(r"(!:|!|:)?([\w/]+)(?:(!=|=|<|>)([\w.,+-]+))?", text)
    assert match is not None, f"{text} is not a term"
    sign, name, operator, value = match.groups(default="")
    if ":" in sign:
        names, named = _NAMED[name]
        if sign == "!:":
            return Term((), f"without {name.replace('_', ' ')}", lambda options: not named(options))
        return Term(names, name.replace("_", " "), named)
    names, values = tuple(name.split("/")), value.split(",")
    words = f"{'without ' if sign else ''}{'/'.join(map(_flag_of, names))}{operator}{value}"
    if name in ("engine", "core", "torch"):
        return Term(("transformer_impl",) if name == "engine" else (), words, _older(name, value))
    holds: dict[str, Callable[[Options], bool]] = {
        "": lambda options: any(_entries(options, names)),
        "!": lambda options: not any(_entries(options, names)),
        "=": lambda options: _among(options, names, values),
        "!=": lambda options: not _among(options, names, values),
        ">": lambda options: _largest(options, *names) > float(value),
        "<": lambda options: _largest(options, *names) < float(value),
    }
    return Term(names, words, holds[sign or operator])


def _older(package: str, oldest: str) -> Callable[[Options], bool]:
    def numbers(version: str) -> list[int]:
        return [int(number) for number in re.findall(r"\d+", version)[:2]]

    def is_older(options: Options) -> bool:
        if sys.modules.get("torch") is None:  # no run: `compare` plans for another machine, and loads neither
            return False
        from megatron_balance.runtime.process import version_of

        version = version_of(_FLAGS[package])
        if package == "engine" and options.get("transformer_impl") != "transformer_engine":
            return False
        if version is None:  # Megatron itself misses the engine
            return package != "engine"
        return numbers(version) < numbers(oldest)

    return is_older


def _flag_of(name: str) -> str:
    return _FLAGS.get(name, f"--{name.replace('_', '-')}")


def _entries(options: Options, names: tuple[str, ...]) -> list[Any]:
    values = map(options.get, names)
    return [entry for value in values for entry in (value if isinstance(value, list) else [value])]


def _among(options: Options, names: tuple[str, ...], values: list[str]) -> bool:
    return any(str(getattr(entry, "name", entry)) in values for entry in _entries(options, names))


def _largest(options: Options, *names: str) -> float:
    return max([entry for entry in _entries(options, names) if isinstance(entry, int | float)], default=0)


def _is_given(value: Any) -> bool:
    return (bool(value) and value != "none") or (isinstance(value, int) and not isinstance(value, bool))


def _text(value: Any) -> str:
    return " ".join(map(_text, value)) if isinstance(value, list | tuple) else str(getattr(value, "name", value))


def _tp(options: Options) -> int:
    return options.get("tensor_model_parallel_size") or 1


def _etp(options: Options) -> int:
    return options.get("expert_tensor_parallel_size") or _tp(options)


def _spans(options: Options, *, ep_size: int) -> bool:
    """A group of experts, or of the tensor-parallel ranks of one, has ranks that hold different micro-batches.

    Expert groups are consecutive ranks, as are the `tp*cp` (`tp` with sizes of their own) that share a micro-batch.
    """
    cp_size = 1 if options.get("balance_dynamic_cp") else options.get("context_parallel_size") or 1
    return bool(options.get("num_experts")) and _tp(options) * cp_size % (_etp(options) * ep_size) != 0


def _layers(letter: str, variant: str = "") -> Callable[[Options], bool]:
    """A pattern of layers has this letter, or attention is this variant."""
    return lambda options: (
        any(options.get(name) == variant for name in _VARIANTS if variant)
        or any(letter in (options.get(name) or "") for name in _PATTERNS)
    )


_VARIANTS = ("experimental_attention_variant", "linear_attention_type")
_PATTERNS = ("hybrid_layer_pattern", "hybrid_override_pattern", "mtp_hybrid_override_pattern")
_SHARDS = ("tensor_parallel_num_weight_shards", "expert_tensor_parallel_num_weight_shards")

has_delta_net = _layers("G", "gated_delta_net")
"""True of options whose model has layers of gated delta nets."""

_NAMED: dict[str, tuple[tuple[str, ...], Callable[[Options], bool]]] = {
    "not_balanced": ((), nothing_balances),
    "experts_span_replicas": (
        ("expert_model_parallel_size",),
        lambda options: _spans(options, ep_size=options.get("expert_model_parallel_size") or 1),
    ),
    "expert_tensors_span_replicas": (
        ("expert_tensor_parallel_size", "tensor_model_parallel_size"),
        lambda options: _spans(options, ep_size=1),
    ),
    "documents": (
        ("dataloader_inter_document_masking", "sft"),
        lambda options: bool(options.get("dataloader_inter_document_masking") and not options.get("sft")),
    ),
    "context_parallel": (
        ("context_parallel_size", "balance_dynamic_cp"),
        lambda options: bool(_largest(options, "context_parallel_size") > 1 or options.get("balance_dynamic_cp")),
    ),
    "aux_loss": (
        ("moe_aux_loss_coeff", "num_experts"),
        lambda options: bool(_largest(options, "moe_aux_loss_coeff") > 0 and options.get("num_experts")),
    ),
    "weights_are_sharded_over_data": (  # validation sets both to the tensor-parallel sizes, where not given
        _SHARDS,
        lambda options: _largest(options, _SHARDS[0]) > _tp(options) or _largest(options, _SHARDS[1]) > _etp(options),
    ),
    "delta_net": ((*_VARIANTS, *_PATTERNS), has_delta_net),
    "mamba": (_PATTERNS, _layers("M")),
    "dsa": ((_VARIANTS[0], *_PATTERNS), _layers("D", "dsa")),
    "autotuned": (
        ("balance_cost", "max_tokens_per_gpu", "balance_rank_speeds"),
        lambda options: autotuned(options)[0] > 0,
    ),
    "stock_evaluation": (
        (),
        lambda options: not options["balance_evaluation"] or options["balance_dynamic_cp"] is not None,
    ),
}


def _rules() -> Iterator[Rule]:
    subject = ""
    for block in re.split(r"\n+(?=\S)", (files(__package__) / "rules.txt").read_text(encoding="utf-8")):
        first, *message = block.splitlines()
        if first.startswith("## "):
            subject = first[3:]
        elif not first.startswith("#"):
            yield Rule(subject, tuple(map(_term, first.split())), " ".join(map(str.strip, message)))


RULES = tuple(_rules())
"""All rules, for pages and for the check on Megatron's parsers."""
