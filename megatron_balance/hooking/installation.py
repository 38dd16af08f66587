"""What of another system is hooked in this process: nothing, or one table of hooks for one choice of settings.

Invariants: installing twice with the same settings installs once; with others it raises and changes nothing; after
`undo()` the process is as before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from megatron_balance.errors import BalanceError
from megatron_balance.hooking.patches import Patches

Settings = TypeVar("Settings")


class Installation(Generic[Settings]):
    """The hooks of this process in one system.

    Args:
        system: its name, for messages.

    Attributes:
        settings: what the hooks serve, or None where there are none.
    """

    def __init__(self, system: str) -> None:
        self.settings: Settings | None = None
        self._system = system
        self._patches: Patches | None = None

    def install(self, settings: Settings, *, hook: Callable[[], Patches]) -> Installation[Settings]:
        """Put hooks in place.

        Args:
            settings: what they serve.
            hook: puts them in place or raises.

        Raises:
            BalanceError: hooks for other settings are in place; nothing is changed then.
        """
        if self.settings is None:
            self._patches, self.settings = hook(), settings
        elif settings != self.settings:
            raise BalanceError(f"{self._system} is hooked already with {self.settings}: undo() that before {settings}.")
        return self

    def undo(self) -> None:
        """Take the hooks out. What runs already keeps what it was started with.

        Raises:
            BalanceError: someone else has wrapped one of the functions since; nothing is changed then.
        """
        if self._patches is not None:
            self._patches.undo()
        self._patches = self.settings = None


def check_version(version: str, *, system: str, supported: Sequence[str], remedy: str) -> str:
    """The version itself, where it is one that the tests run on.

    Args:
        version: that is installed.
        system: whose.
        supported: versions, or beginnings of versions: `0.9` stands for all of 0.9.*.
        remedy: what to do about another.

    Raises:
        BalanceError: it is not supported.
    """
    if version not in supported and not version.startswith(tuple(f"{release}." for release in supported)):
        raise BalanceError(f"{system} is {version}; megatron_balance is tested on {', '.join(supported)}: {remedy}.")
    return version
