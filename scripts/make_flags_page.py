"""Writes docs/flags.md from the parsers themselves: `python scripts/make_flags_page.py`.

tests/test_docs.py fails where the page is older than a flag.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from megatron_balance.cli import build_parser
from megatron_balance.mcore.options.balance_flags import BALANCE_FLAGS
from megatron_balance.mcore.setup.flags import add_balance_args

PAGE = Path(__file__).resolve().parents[1] / "docs" / "flags.md"

_HEAD = """\
# Flags

Made by `python scripts/make_flags_page.py` from the parsers; do not edit.

## In training

They go among Megatron's own flags, in any order. Without one of them a run is stock.
"""


def flags_page() -> str:
    """The page, as Markdown."""
    lines = [_HEAD, *_tables(add_balance_args(argparse.ArgumentParser(add_help=False)))]
    lines += ["What is refused, before anything is initialised:", "", *(f"- {row.rule}" for row in BALANCE_FLAGS), ""]
    lines += ["What becomes of Megatron's own options: [Megatron's options](options.md).", ""]
    for name, command in _commands(build_parser()).items():
        assert command.description is not None
        lines += [f"## megatron-balance {name}", "", command.description, "", *_tables(command)]
    return "\n".join(lines).rstrip() + "\n"


def _commands(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    (subparsers,) = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    return subparsers.choices


def _tables(parser: argparse.ArgumentParser) -> Iterator[str]:
    """A table of all flags, a row of its own for the name of a group."""
    formatter = parser._get_formatter()
    yield "| flag | meaning |"
    yield "|---|---|"
    for group in parser._action_groups:
        actions = [action for action in group._group_actions if not isinstance(action, argparse._HelpAction)]
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


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


def main() -> None:
    """Write the page."""
    PAGE.write_text(flags_page(), encoding="utf-8")


if __name__ == "__main__":
    main()
