"""Judges Megatron's options: refuses some, leaves a run stock for some, warns of some; all others are harmless.

Rules are applied right after parsing, before anything is initialised, and again on validated arguments, which
checkpoints and Megatron's validation may have changed; all ranks agree on the findings.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

from megatron_balance.mcore.options.conditions import Options, Term, nothing_balances, parse, seen
from megatron_balance.mcore.options.rules import BALANCE_FLAGS, CAUTIONS, DYNAMIC_CP, REFUSED, STOCK, UNTRIED

__all__ = [
    "RULES",
    "Options",
    "Rule",
    "cautions",
    "dynamic_cp_problem",
    "executor_runs_our_plan",
    "nothing_balances",
    "problems",
    "stock_notice",
    "why_stock",
]


@dataclass(frozen=True)
class Rule:
    """A rule: the heading under which pages list it, its condition as text, and the reason with the remedy."""

    subject: str
    condition: str
    says: str

    @cached_property
    def terms(self) -> tuple[Term, ...]:
        """The terms of the condition, all of which must hold."""
        return parse(self.condition)

    @property
    def words(self) -> str:
        """The condition in words."""
        return ", ".join(term.words for term in self.terms)

    @property
    def names(self) -> set[str]:
        """Megatron's options that it is about."""
        ours = ("balance_", "use_dynamic_batch_size", "max_tokens_per_gpu")
        return {name for term in self.terms for name in term.names if not name.startswith(ours)}

    def message(self, options: Options) -> str | None:
        """The options with the values seen, the reason and the remedy; None where it does not apply."""
        if not all(term.holds(options) for term in self.terms):
            return None
        return f"{seen(options, terms=self.terms)}: {self.says}."


def _rules(subject: str, rules: Mapping[str, str]) -> tuple[Rule, ...]:
    return tuple(Rule(subject, condition, says) for condition, says in rules.items())


_OF_FLAGS = _rules("Balance flags", BALANCE_FLAGS)
_OF_SIZES = _rules("Context parallelism of each micro-batch", DYNAMIC_CP)
_REFUSED = tuple(rule for subject, rules in REFUSED.items() for rule in _rules(subject, rules))
_STOCK = _rules("Stock", STOCK)
_CAUTIONS = _rules("Cautions", CAUTIONS)
_UNTRIED = _rules("Not tried on a GPU", UNTRIED)

RULES = (*_OF_FLAGS, *_REFUSED, *_STOCK, *_CAUTIONS, *_UNTRIED)
"""All rules, for pages and for the check on Megatron's parsers."""


def problems(options: Options) -> list[str]:
    """All refusals of these options, parsed or validated; empty where they work together."""
    return _messages(_OF_FLAGS, options) + ([] if nothing_balances(options) else _messages(_REFUSED, options))


def why_stock(args: Namespace | Options) -> str | None:
    """The reason why a run with balance flags must stay stock, or None.

    Args:
        args: Megatron's namespace with the balance flags, parsed or validated.
    """
    options = _options(args)
    return next(iter([] if nothing_balances(options) else _messages(_STOCK, options)), None)


def cautions(args: Namespace | Options, *, untried: bool = True) -> list[str]:
    """Warnings about options that a run that balances may have.

    Args:
        args: Megatron's namespace with the balance flags, parsed or validated.
        untried: warn also of what no test has run on a GPU.
    """
    options = _options(args)
    rules = (*_CAUTIONS, *_UNTRIED) if untried else _CAUTIONS
    return [] if nothing_balances(options) else _messages(rules, options)


def dynamic_cp_problem(options: Options) -> str | None:
    """The first refusal of `--balance-context-parallel` with a model; None where there is none."""
    return next(iter(_messages(_OF_SIZES, options)), None)


def executor_runs_our_plan(options: Options) -> bool:
    """True if dev's executor of dynamic context parallelism runs this package's plan."""
    return bool(options.get("dynamic_context_parallel") and options.get("balance_data"))


def stock_notice(options: Options, *, reason: str) -> str:
    """The log line of a run that stays stock for a reason from `why_stock`."""
    if executor_runs_our_plan(options):
        return f"Megatron's own executor runs this package's plan. {reason}"
    return f"training continues without balancing. {reason}"


def _options(args: Namespace | Options) -> Options:
    return args if isinstance(args, Mapping) else vars(args)


def _messages(rules: Iterable[Rule], options: Options) -> list[str]:
    return [message for rule in rules if (message := rule.message(options)) is not None]
