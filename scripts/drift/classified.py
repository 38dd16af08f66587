"""Options of a release that nobody has classified, and rows of mcore/options that the release does not bear out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from drift.compare import Finding
from drift.parser_options import options_of
from drift.sources import Sources
from megatron_balance.mcore.options.option import Option, Support, flag_of

IRRELEVANT = Path(__file__).with_name("irrelevant_options.txt")


@dataclass(frozen=True)
class Classified:
    """The options of a release.

    Attributes:
        options: all, by the names under which argparse stores them.
        counts: in how many options each kind of row, or none, has a say; an option may be in rows of several kinds.
        findings: what nobody has classified, and rows that a release does not bear out.
    """

    options: frozenset[str]
    counts: dict[str, int]
    findings: list[Finding]


def classified(rows: Sequence[Option], *, sources: Sources, release: tuple[int, int] | None) -> Classified:
    """Look every option of a release up.

    Args:
        rows: of the tables.
        sources: of the release.
        release: as `(major, minor)`; None for a branch, which may say that it is a release and have other options.
    """
    options = frozenset(options_of(sources))
    kinds = {
        kind: {name for row in rows if row.support is kind for name in (*row.names, *row.also)} for kind in Support
    }
    irrelevant = {name for name in options if any(fnmatchcase(name, pattern) for pattern in irrelevant_patterns())}
    in_rows = set().union(*kinds.values())
    counts = {kind.value: len(names & options) for kind, names in kinds.items()}
    counts |= {"irrelevant": len(irrelevant - in_rows), "unclassified": len(options - in_rows - irrelevant)}
    findings = [
        Finding(flag_of(name), False, f"is an option that neither a row of mcore/options nor {IRRELEVANT.name} has")
        for name in sorted(options - in_rows - irrelevant)
    ]
    if release is not None:
        findings += _misplaced(rows, options=options, release=release)
    return Classified(options, counts, findings)


def irrelevant_patterns() -> list[str]:
    """Names and beginnings of names."""
    lines = IRRELEVANT.read_text("utf-8").splitlines()
    return [name for line in lines if not line.startswith("#") for name in line.split()]


def _misplaced(rows: Sequence[Option], *, options: frozenset[str], release: tuple[int, int]) -> Iterator[Finding]:
    """Rows of which a release that they name has no option; this package's own flags are none of its options."""
    for row in rows:
        megatrons = [name for name in row.names if not name.startswith("balance_")] or row.also
        if row.first <= release <= row.last and not row.of_scripts and not options.intersection(megatrons):
            yield Finding(flag_of(row.names[0]), True, "is no option of this release, and its row says that it is")
