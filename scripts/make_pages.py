"""Makes pages of the site from code: flags and options while the site is built, docs/licences.md by this script.

What is installed differs from machine to machine, so the page of licences is kept; tests/test_docs.py fails where a
dependency is missing in it.
"""

from __future__ import annotations

import argparse
import itertools
import re
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import tomllib

from megatron_balance.cli import build_parser
from megatron_balance.mcore.options import RULES
from megatron_balance.mcore.setup.flags import add_balance_args

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"

_FLAGS = """\
# Flags

Made from the parsers when the site is built.

## In training

They go among Megatron's own flags, in any order. Without one of them a run is stock.
"""
_OPTIONS = """\
# Megatron's options

Made when the site is built, from `megatron_balance/mcore/options`.

In a run with `--balance-data` or `--use-dynamic-batch-size`, on Megatron 0.17 to 0.19 and its main and dev branches:

- what is **refused** ends the run right after parsing, or before its first step, with an error that names the option,
  the value and the remedy;
- under **stock**, Megatron's own scheduler and executor run, and the log says so once;
- a **caution** is printed once, and the run balances; so is what no test has run **on a GPU**.

Every other option of Megatron trains and balances as it is: `scripts/drift/irrelevant_options.txt` lists those that
were reviewed, and `scripts/check drift` fails where a supported release has an option in neither list.
"""
_LICENCES = """\
# Licences

megatron_balance is under the Apache License 2.0 (`LICENSE`). It contains no code of others. What it imports is
installed beside it by its users; this is what each extra brings in directly, as the packages say themselves.
`scripts/make_pages.py` writes this page.

| package | needed by | licence |
|---|---|---|
"""
_SPDX = {"Apache 2.0": "Apache-2.0", "Apache Software License": "Apache-2.0", "BSD 2-Clause License": "BSD-2-Clause"}
"""Names of licences in older metadata, and in SPDX."""


def flags_page() -> str:
    """Every flag in training and of every command."""
    lines = [_FLAGS, *_tables(add_balance_args(argparse.ArgumentParser(add_help=False)))]
    lines += [
        "What is refused, before anything is initialised:",
        "",
        *(f"- {rule.words}: {rule.says}" for rule in RULES if rule.subject == "Balance flags"),
        "",
    ]
    lines += ["What becomes of Megatron's own options: [Megatron's options](options.md).", ""]
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
            shown = f"{flag} {value}".strip() if action.option_strings else flag
            meaning = formatter._expand_help(action) if action.help else ""
            yield f"| `{_cell(shown)}` | {_cell(_with_default(meaning, action))} |"
    yield ""


def _with_default(meaning: str, action: argparse.Action) -> str:
    """The default, where the text does not say it and there is one."""
    named = "default" in meaning or isinstance(action, argparse._StoreTrueAction | argparse._StoreFalseAction)
    return meaning if named or action.default in (None, []) else f"{meaning.rstrip('.')}. Default: `{action.default}`."


def options_page() -> str:
    """What becomes of Megatron's options that a rule names."""
    lines = [_OPTIONS]
    for subject, rules in itertools.groupby(RULES, key=lambda rule: rule.subject):
        if subject != "Balance flags":
            title = subject if subject in ("Stock", "Cautions", "Not tried on a GPU") else f"Refused: {subject.lower()}"
            lines += [f"## {title}", "", "| where | says |", "|---|---|"]
            lines += [f"| {_cell(rule.words)} | {_cell(rule.says)} |" for rule in rules] + [""]
    return "\n".join(lines).rstrip() + "\n"


def licences_page() -> str:
    """The licence of every package that this one can bring in directly, from what is installed.

    What is not installed here keeps the row that an installation wrote.
    """
    known = dict(re.findall(r"^\| `([^`]+)` \| [^|]+ \| ([^|]+) \|$", _old("licences"), flags=re.MULTILINE))
    return _LICENCES + "".join(
        f"| `{package}` | {', '.join(groups)} | {_licence(package, known=known.get(package))} |\n"
        for package, groups in _dependencies().items()
    )


def _dependencies() -> dict[str, list[str]]:
    """Name of each package that pyproject.toml asks for → what needs it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    needed: dict[str, list[str]] = {}
    for group, requirements in {"always": project["dependencies"], **project["optional-dependencies"]}.items():
        for requirement in requirements:
            needed.setdefault(re.split(r"[^\w.-]", requirement)[0], []).append(group)
    return dict(sorted(needed.items()))


def _licence(package: str, *, known: str | None) -> str:
    """As the installed package says, an SPDX expression where it gives one."""
    try:
        said = metadata.metadata(package)
    except metadata.PackageNotFoundError:
        if known is None:
            raise SystemExit(f"make_pages.py: install {package} to read its licence.") from None
        return known
    name = (said.get("License") or "").strip()
    classifiers = [one.split(" :: ")[-1] for one in said.get_all("Classifier") or [] if one.startswith("License ::")]
    found = said.get("License-Expression") or (name if "\n" not in name and len(name) <= 60 else "")
    return _SPDX.get(found, found) or ", ".join(_SPDX.get(one, one) for one in classifiers if one != "OSI Approved")


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


def _old(name: str) -> str:
    return (DOCS / f"{name}.md").read_text(encoding="utf-8")


SITE_PAGES = {"flags": flags_page, "options": options_page}
"""Name of a page that is made while the site is built → its text."""

if __name__ == "__main__":
    (DOCS / "licences.md").write_text(licences_page(), encoding="utf-8")
