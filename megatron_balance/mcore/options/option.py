"""One row of the option tables: Megatron options, the case, and its support under balancing.

There are three kinds: the case trains and balances, the run ends before its first step, or it stays stock with a
warning.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any

from megatron_balance.mcore.options.conditions import Condition

_FLAGS = {
    "fp8": "--fp8-format",
    "fp4": "--fp4-format",
    "overlap_p2p_comm": "--no-overlap-p2p-communication",
    "overlap_p2p_comm_warmup_flush": "--overlap-p2p-communication-warmup-flush",
    "microbatch_group_size_per_vp_stage": "--microbatch-group-size-per-virtual-pipeline-stage",
    "use_mamba_mem_eff_path": "--disable-mamba-mem-eff-path",
    "create_attention_mask_in_dataloader": "--no-create-attention-mask-in-dataloader",
    "torch_fsdp2_reshard_after_forward": "--torch-fsdp2-no-reshard-after-forward",
}
"""Flags that do not follow from the names by which argparse stores them."""


class Support(Enum):
    """The kinds of rows."""

    SUPPORTED = "supported"
    REFUSED = "refused"
    STOCK = "stock"


@dataclass(frozen=True, kw_only=True)
class Option:
    """A row.

    Attributes:
        names: the options that decide, as argparse stores them, the row's subject first; messages show those that are
            given.
        also: options that belong to the case, or have a meaning only together with those.
        case: the values that the row covers, in words; empty for all values.
        support: the kind.
        when: True for a namespace, parsed or validated, that is such a case. A row that is supported and has no caution
            needs none.
        because: why it is refused or left stock; empty where it is supported.
        remedy: what to set in its place.
        caution: a warning logged once although the option is supported, or empty.
        first: the first release that has the option, as `(major, minor)`.
        last: the last release that has it.
        of_scripts: only scripts define it, no release does.
    """

    names: tuple[str, ...]
    also: tuple[str, ...] = ()
    support: Support
    case: str = ""
    when: Condition | None = None
    because: str = ""
    remedy: str = ""
    caution: str = ""
    first: tuple[int, int] = (0, 17)
    last: tuple[int, int] = (999, 0)
    of_scripts: bool = False

    def __post_init__(self) -> None:
        supported = self.support is Support.SUPPORTED
        if not self.names or supported == bool(self.because and self.remedy):
            raise ValueError(
                f"{self.names}: a row that is not supported gives its reason and remedy, and only such a row"
            )
        if self.when is None and (self.caution or not supported):
            raise ValueError(f"{self.names}: it has a message and no condition")

    @property
    def rule(self) -> str:
        """The row of an unsupported option, in one line."""
        return f"{flag_of(self.names[0])} {self.case or 'set'}: {self.because}; {self.remedy}"

    def applies(self, args: Any) -> bool:
        """True if a namespace, parsed or validated, is this row's case."""
        return self.when is not None and self.when(args)

    def message(self, args: Any) -> str:
        """The options with the values seen, the reason and the remedy; the caution of a supported row."""
        seen = _seen(args, names=self.names)
        if self.support is Support.SUPPORTED:
            return f"{seen}: {self.caution}."
        return f"{seen}: {self.because}; {self.remedy}."


def flag_of(name: str) -> str:
    """The flag of an option that argparse stores by this name."""
    return _FLAGS.get(name, f"--{name.replace('_', '-')}")


def _seen(args: Any, *, names: tuple[str, ...]) -> str:
    """The options that have values, or the first where none has: `--flag is value with --other-flag value`."""
    present = [name for name in names if hasattr(args, name)]
    valued = [name for name in present if _has_value(getattr(args, name))]
    first, *others = valued or present[:1]
    return " with ".join([_first(first, getattr(args, first)), *_others(args, names=others)])


def _has_value(value: Any) -> bool:
    return bool(value) and value != "none"


def _first(name: str, value: Any) -> str:
    flag = flag_of(name)
    if isinstance(value, bool):
        is_set = value is not flag.startswith(("--no-", "--disable-"))
        return f"{flag} is {'set' if is_set else 'not set'}"
    return f"{flag} is {_words(value)}"


def _others(args: Any, *, names: list[str]) -> Iterator[str]:
    for name in names:
        value = getattr(args, name)
        yield flag_of(name) if isinstance(value, bool) else f"{flag_of(name)} {_words(value)}"


def _words(value: Any) -> str:
    if isinstance(value, list | tuple):
        return " ".join(map(_words, value))
    return value.name if isinstance(value, Enum) else str(value)
