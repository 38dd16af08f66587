"""Writes docs/options.md from the tables in megatron_balance/mcore/options: `python scripts/make_options_page.py`.

tests/test_docs.py fails where the page is older than a row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from megatron_balance.mcore.options.option import Option, Support, flag_of
from megatron_balance.mcore.options.table import SUBJECTS

PAGE = Path(__file__).resolve().parents[1] / "docs" / "options.md"

_HEAD = """\
# Megatron's options

Made by `python scripts/make_options_page.py` from `megatron_balance/mcore/options`; do not edit.

Options of Megatron 0.17 to 0.19 and of its main and dev branches that change shapes, numbers of tokens, dispatch,
precision or the loop, in a run with `--balance-data` or `--use-dynamic-batch-size`. Each case is one of

- **supported**: it trains and balances; a caution, where there is one, is printed once a run;
- **refused**: the run ends right after parsing, or before its first step, with an error that names the option, the
  value and the remedy;
- **stock**: Megatron's own scheduler and executor run, and the log says so once.

An option that is not here changes nothing that balancing relies on: `scripts/drift/irrelevant_options.txt` lists those,
and `scripts/check drift` fails where a supported release has an option in neither list.
"""


def options_page() -> str:
    """The page, as Markdown."""
    lines = [_HEAD]
    for subject, rows in SUBJECTS.items():
        lines += [f"## {subject}", "", *_table(rows), ""]
    return "\n".join(lines).rstrip() + "\n"


def _table(rows: Sequence[Option]) -> Iterator[str]:
    yield "| option | case | | says |"
    yield "|---|---|---|---|"
    for row in rows:
        flags = ", ".join(f"`{flag_of(name)}`" for name in row.names)
        yield f"| {flags}{_releases(row)} | {_cell(row.case)} | {row.support.value} | {_cell(_says(row))} |"


def _says(row: Option) -> str:
    if row.support is not Support.SUPPORTED:
        return f"{row.because}; {row.remedy}"
    return row.caution


def _releases(row: Option) -> str:
    first, last = (".".join(map(str, release)) for release in (row.first, row.last))
    if row.first == (0, 17):
        return "" if row.last == (999, 0) else f" (to {last})"
    return f" (from {first})" if row.last == (999, 0) else f" ({first} to {last})"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


def main() -> None:
    """Write the page."""
    PAGE.write_text(options_page(), encoding="utf-8")


if __name__ == "__main__":
    main()
