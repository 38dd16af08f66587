"""One row of the tables: options of Megatron, in a case that matters, and what becomes of a run that balances.

There are three kinds and no fourth: a test trains or checks the case, the run ends before its first step, or it stays
stock and says so.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any

from megatron_balance.mcore.options.conditions import Condition


class Support(Enum):
    """The kinds of rows."""

    SUPPORTED = "supported"
    REFUSED = "refused"
    STOCK = "stock"


@dataclass(frozen=True, kw_only=True)
class Option:
    """A row.

    Attributes:
        names: the options, as argparse stores them, the one that decides first.
        case: the values that the row is about, in words; all values where it is empty.
        support: the kind.
        when: whether the case is that of a namespace, parsed or validated. A row that is supported and has no caution
            needs none.
        because: why it is refused or left stock; empty where it is supported.
        remedy: what to set in its place.
        test: the test that trains or checks it, `tests/…py::name`; of what is supported.
        caution: what a run is told once although it is supported, or empty.
        first: the first release that has the option, as `(major, minor)`.
        last: the last release that has it.
    """

    names: tuple[str, ...]
    support: Support
    case: str = ""
    when: Condition | None = None
    because: str = ""
    remedy: str = ""
    test: str = ""
    caution: str = ""
    first: tuple[int, int] = (0, 17)
    last: tuple[int, int] = (999, 0)

    def __post_init__(self) -> None:
        supported = self.support is Support.SUPPORTED
        if not self.names or supported != bool(self.test) or supported == bool(self.because and self.remedy):
            raise ValueError(f"{self.names}: a supported row names its test, another one says why and the remedy")
        if self.when is None and (self.caution or not supported):
            raise ValueError(f"{self.names}: it says something, and not when")

    @property
    def flags(self) -> str:
        """The options as they are written on a command line."""
        return ", ".join(map(flag_of, self.names))

    @property
    def rule(self) -> str:
        """The row of what is not supported, in one line."""
        return f"{flag_of(self.names[0])} {self.case or 'set'}: {self.because}; {self.remedy}"

    def applies(self, args: Any) -> bool:
        """Whether a namespace, parsed or validated, is this row's case."""
        return self.when is not None and self.when(args)

    def message(self, args: Any) -> str:
        """The options with the values seen, why, and the remedy; of a supported row its caution."""
        seen = " with ".join(_seen(args, names=self.names))
        if self.support is Support.SUPPORTED:
            return f"{seen}: {self.caution}"
        return f"{seen}: {self.because}; {self.remedy}."


def flag_of(name: str) -> str:
    """The flag of an option that argparse stores by this name."""
    return f"--{name.replace('_', '-')}"


def _seen(args: Any, *, names: tuple[str, ...]) -> Iterator[str]:
    """`--flag is value` of the first, `--flag value` of those behind it, in this release."""
    verb = " is"
    for name in names:
        if not hasattr(args, name):
            continue
        value = getattr(args, name)
        if isinstance(value, bool):
            said = {True: " is set", False: " is not set"} if verb else {True: "", False: " not set"}
            yield f"{flag_of(name)}{said[value]}"
        else:
            yield f"{flag_of(name)}{verb} {_words(value)}"
        verb = ""


def _words(value: Any) -> str:
    if isinstance(value, list | tuple):
        return " ".join(map(_words, value))
    return value.name if isinstance(value, Enum) else str(value)
