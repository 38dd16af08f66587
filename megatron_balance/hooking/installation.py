"""Keeps the hooks that one adapter has installed in this process, and the settings they serve.

Invariants: installing twice with the same settings installs once; other settings raise and change nothing; after
`undo()` the process is as before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar

from megatron_balance.errors import BalanceError

Settings = TypeVar("Settings")


class Undoable(Protocol):
    """Something installed that can be removed: `Patches`, or an entry in a system's registry."""

    def undo(self) -> None:
        """Remove it.

        Raises:
            BalanceError: someone else has wrapped it since; nothing is changed then.
        """
        ...


class Installation(Generic[Settings]):
    """The hooks of this process in one system, and the settings that they serve; None where nothing is installed."""

    def __init__(self, system: str) -> None:
        self.settings: Settings | None = None
        self._system = system
        self._in_place: list[Undoable] = []

    def install(self, settings: Settings, *, hook: Callable[[], Undoable]) -> Installation[Settings]:
        """Install hooks that serve these settings; `hook` installs all of them, or raises and changes nothing.

        Raises:
            BalanceError: hooks for other settings are installed; nothing is changed then.
        """
        if self.settings is None:
            self._in_place, self.settings = [hook()], settings
        elif settings != self.settings:
            raise BalanceError(f"{self._system} is hooked already with {self.settings}: undo() that before {settings}.")
        return self

    def add(self, hooks: Undoable) -> None:
        """Keep hooks installed later, in modules loaded after `install`; `undo` removes them too."""
        self._in_place.append(hooks)

    def undo(self) -> None:
        """Remove the hooks, the latest first. Objects made with them keep them.

        Raises:
            BalanceError: someone else has wrapped a hooked function since; that hook and earlier ones stay.
        """
        while self._in_place:
            self._in_place[-1].undo()
            self._in_place.pop()
        self.settings = None


def check_version(version: str, *, system: str, supported: Sequence[str], remedy: str) -> str:
    """Returns the version of a system; a BalanceError where no test runs on it. `0.9` stands for all of 0.9.*."""
    if version not in supported and not version.startswith(tuple(f"{release}." for release in supported)):
        raise BalanceError(f"{system} is {version}; megatron_balance is tested on {', '.join(supported)}: {remedy}.")
    return version
