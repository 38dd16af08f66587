"""Judges Megatron's options: refuses some, leaves a run stock for some, warns of some; all others are harmless.

Rules are applied right after parsing, before anything is initialised, and again on validated arguments, which
checkpoints and Megatron's validation may have changed; all ranks agree on the findings.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from typing import NamedTuple

from megatron_balance.mcore.options.conditions import Options, Term, nothing_balances, parse, seen
from megatron_balance.mcore.options.rules import BALANCE_FLAGS, CAUTIONS, REFUSED, STOCK, UNTRIED

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


_OF_FLAGS, _CAUTIONS, _UNTRIED = "Balance flags", "Cautions", "Not tried on a GPU"
_TABLES = {_OF_FLAGS: BALANCE_FLAGS, **REFUSED, "Stock": STOCK, _CAUTIONS: CAUTIONS, _UNTRIED: UNTRIED}

RULES = tuple(Rule(subject, parse(where), says) for subject, rules in _TABLES.items() for where, says in rules.items())
"""All rules, for pages and for the check on Megatron's parsers."""


def _messages(options: Options, *subjects: str) -> list[str]:
    """For each rule of these subjects that applies: the options with the values seen, the reason and the remedy."""
    return [
        f"{seen(options, terms=rule.terms)}: {rule.says}."
        for rule in RULES
        if rule.subject in subjects and all(term.holds(options) for term in rule.terms)
    ]


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
