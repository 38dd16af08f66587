"""Writes pages of docs/ from the code, and the outputs of the notebook: `python .ci/make_pages.py` after a change.

tests/test_docs.py compares them.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import io
import itertools
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1] / "tests" / "training"))
from table import DYNAMIC_CP, ROWS, SHARED, SHARED_ROWS, Row

from megatron_balance.cli import build_parser
from megatron_balance.mcore.setup.flags import add_balance_args, parse_flags
from megatron_balance.mcore.setup.rules import (
    CAUTIONS,
    FLAG_RULES,
    PACKAGES,
    RULES,
    UNTRIED,
    Rule,
    flag_of,
    messages,
)

_FLAGS = """\
# Flags

Made from the parsers by `.ci/make_pages.py`.

## In training

They go among Megatron's own flags, in any order. Without one of them a run is stock.
"""
_MODELS = """\
# Models and tests

Made from `tests/training/table.py` by `.ci/make_pages.py`. A name in a cell is that of a run whose losses, gradient
norms, evaluations and log equal a stock run of its layout by the number format: `NAME` is the test
`tests/training/test_matrix.py::test_equals_stock[NAME]`, with shared prefixes that of `test_prefix_sharing.py`. Shapes
are small, kernels that need a GPU have stand-ins on the CPU, and no run has used a GPU. Losses of routers are equal as
far as [their caution](options.md#cautions) says. [Models](models.md) has what is counted, and what else is refused.
"""
_OPTIONS = """\
# Megatron's options

Made from `megatron_balance/mcore/setup/rules.txt` by `.ci/make_pages.py`. A row applies where all that its first
column names is so.

In a run with `--balance-data` or `--use-dynamic-batch-size`, on Megatron 0.17 to 0.19 and its main and dev branches:

- what is **refused** ends the run right after parsing, or before its first step, with an error that names the option,
  the value and the remedy;
- a **caution** is printed once, and the run balances; so is what no test has run **on a GPU**.

Every other option of Megatron trains and balances as it is: `.ci/drift/irrelevant_options.txt` lists those that
were reviewed, and `scripts/check drift` fails where a supported release has an option in neither list.
"""


def flags_page() -> str:
    """Every flag in training and of every command."""
    lines = [_FLAGS, *_tables(add_balance_args(argparse.ArgumentParser(add_help=False)))]
    lines += ["What is refused, before anything is initialised:", ""]
    lines += [f"- {_condition(rule)}: {rule.message}." for rule in RULES if rule.subject == FLAG_RULES]
    lines += ["", "What becomes of Megatron's own options: [Megatron's options](options.md).", ""]
    (commands,) = (action for action in build_parser()._actions if isinstance(action, argparse._SubParsersAction))
    for name, command in commands.choices.items():
        lines += [f"## megatron-balance {name}", "", command.description, "", *_tables(command)]
    return "\n".join(lines).rstrip() + "\n"


def _tables(parser: argparse.ArgumentParser) -> Iterator[str]:
    """A table of all flags, a row of its own for the name of a group."""
    formatter = parser._get_formatter()
    yield from ("| flag | meaning |", "|---|---|")
    for group in parser._action_groups:
        actions = [
            action
            for action in group._group_actions
            if not isinstance(action, argparse._HelpAction) and action.help is not argparse.SUPPRESS
        ]
        if actions and group.title not in ("positional arguments", "options", "balance"):
            yield f"| **{group.title}** | |"
        for action in actions:
            # argparse's own text: it fills defaults in and writes the value as --help does.
            flag = ", ".join(action.option_strings) or str(action.metavar or action.dest)
            value = formatter._format_args(action, formatter._get_default_metavar_for_optional(action))
            heading = f"{flag} {value}".strip() if action.option_strings else flag
            meaning = formatter._expand_help(action) if action.help else ""
            yield f"| `{_cell(heading)}` | {_cell(_with_default(meaning, action))} |"
    yield ""


def _with_default(meaning: str, action: argparse.Action) -> str:
    """The default, where the text does not say it and there is one."""
    named = "default" in meaning or isinstance(action, argparse._StoreTrueAction | argparse._StoreFalseAction)
    return meaning if named or action.default in (None, []) else f"{meaning.rstrip('.')}. Default: `{action.default}`."


def options_page() -> str:
    """What becomes of Megatron's options that a rule names."""
    lines = [_OPTIONS]
    for subject, rules in itertools.groupby(RULES, key=lambda rule: rule.subject):
        if subject != FLAG_RULES:
            title = subject if subject in (CAUTIONS, UNTRIED) else f"Refused: {subject.lower()}"
            lines += [f"## {title}", "", "| where | says |", "|---|---|"]
            lines += [f"| {_cell(_condition(rule))} | {_cell(rule.message)} |" for rule in rules] + [""]
    return "\n".join(lines).rstrip() + "\n"


_NAMED = {
    ":not_balanced": "no flag that balances",
    "!balance_evaluation": "`--no-balance-evaluation`",
    ":context_parallel": "context parallelism",
    ":expert_tensors_span_replicas": "experts on more tensor-parallel ranks than other layers",
    ":weights_are_sharded_over_data": "weights sharded over data-parallel ranks",
    ":delta_net": "gated delta nets",
    ":mamba": "Mamba layers",
    ":dsa": "sparse attention (DSA)",
    ":autotuned": "settings that are `auto`",
}
"""What conditions of rules.py that have a name stand for."""


def _condition(rule: Rule) -> str:
    """Its terms in words: "`--a` other than x with `--b` and `--c` above 1, without `--d`"."""
    terms = rule.condition.split()
    absent = [term for term in terms if term.startswith("!") and "=" not in term and term not in _NAMED]
    present = [_phrase(term) for term in terms if term not in absent]
    text = " with ".join(filter(None, [*present[:1], " and ".join(present[1:])]))
    without = " or ".join(_phrase(term[1:]) for term in absent)
    return " without ".join(filter(None, [text, without])) if present else f"no {without}"


def _phrase(term: str) -> str:
    """A term in words."""
    if term in _NAMED:
        return _NAMED[term]
    match = re.fullmatch(r"(!?)([\w/]+)([=<>]?)(.*)", term)
    assert match is not None, term
    negation, names, operator, value = match.groups()
    values = " or ".join(text for text in value.split(",") if text not in ("None", "False"))
    relations = {"": "", "=": "other than " if negation else "", ">": "above ", "<": "below "}
    if names in PACKAGES:
        return f"{PACKAGES[names]} before {value}"
    flags = " or ".join(f"`{flag_of(name)}`" for name in names.split("/"))
    return f"{flags} {relations[operator] * bool(values)}{values}".rstrip()


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


def models_page() -> str:
    """For each model which test shows what, or why it is refused."""
    models: dict[str, list[Row]] = {}
    for row in ROWS:
        for name in _models(row):
            models.setdefault(name, []).append(row)
    lines = [
        _MODELS,
        "| model | packed, moved, by FLOPs | evaluation | dynamic sizes | loss weightings | shared prefixes |",
        "|---|---|---|---|---|---|",
    ]
    for name, rows in models.items():
        weighted = [row for row in rows if "--balance-loss-weighting" in row.balance]
        plain = [row for row in rows if not row.dynamic and row not in weighted]
        cells = [plain, [row for row in plain if row.evaluates], [row for row in rows if row.dynamic], weighted]
        shown = [_tests(cell) for cell in cells]
        if not cells[2]:
            options, _ = parse_flags(f"{rows[0].stock} {DYNAMIC_CP}".split(), with_megatron=True)
            problems = messages(vars(options), "Context parallelism of each micro-batch")
            shown[2] = f"refused: {_cell(problems[0])}" if problems else "not tested"
        shared = [row for row in SHARED_ROWS if name in _models(row)]
        options, _ = parse_flags(f"{rows[0].stock} {SHARED} {_SHAREABLE}".split(), with_megatron=True)
        problems = messages(vars(options), "Shared prefixes")
        shown.append(f"refused: {_cell(problems[0])}" if problems else _tests(shared))
        lines.append(f"| {name} | {' | '.join(shown)} |")
    return "\n".join(lines) + "\n"


_SHAREABLE = "--no-rope-fusion --attention-dropout 0 --hidden-dropout 0"
"""What shared prefixes need of every model."""


def _models(row: Row) -> list[str]:
    names = {"dense": "dense attention, as Llama and Qwen3", "moe": "mixture of experts"}
    predicts = "mtp" in row.flags
    model = row.model or "dense"
    shown = [] if predicts and model in names else [names.get(model, model)]
    return shown + (["multi-token prediction"] if predicts else [])


def _tests(rows: list[Row]) -> str:
    names = [f"`{row.layout}-{row.name}`" for row in rows]
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(names[:5]) + more or "not tested"


def notebook_page() -> str:
    """The notebook with the outputs of its cells, run in order as Jupyter would."""
    notebook, names = json.loads(NOTEBOOK.read_text(encoding="utf-8")), dict[str, Any]()
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    for number, cell in enumerate(cells, start=1):
        body, said, last = ast.parse("".join(cell["source"])).body, io.StringIO(), None
        with contextlib.redirect_stdout(said):
            for node in body:
                if node is body[-1] and isinstance(node, ast.Expr):
                    last = eval(compile(ast.Expression(node.value), "<cell>", "eval"), names)  # noqa: S307
                else:
                    exec(compile(ast.Module([node], type_ignores=[]), "<cell>", "exec"), names)
        cell["outputs"] = []
        if said.getvalue():
            text = said.getvalue().splitlines(keepends=True)
            cell["outputs"].append({"name": "stdout", "output_type": "stream", "text": text})
        if last is not None:
            data = {"image/svg+xml": [last._repr_svg_()]}
            cell["outputs"].append(
                {"data": data, "execution_count": number, "metadata": {}, "output_type": "execute_result"}
            )
        cell["execution_count"] = number
    return json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"


NOTEBOOK = Path(__file__).parents[1] / "examples" / "lengths.ipynb"
PAGES = {
    "models-tested.md": models_page,
    "flags.md": flags_page,
    "options.md": options_page,
    "../examples/lengths.ipynb": notebook_page,
}
"""Path of a page from docs/ → what it says."""

if __name__ == "__main__":
    for name, page in PAGES.items():
        (Path(__file__).parents[1] / "docs" / name).write_text(page(), encoding="utf-8")
