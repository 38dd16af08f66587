"""Installs the hooks of one adapter in this process, and runs a script with them in place.

Invariants: importing an adapter patches nothing; either all hooks are in place or none; an untested version, a target
that moved or hooks for other settings are refused by name; `undo()` restores the very objects.
"""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

from megatron_balance.errors import BalanceError
from megatron_balance.hooking import Function, Hook, Installation, Patches, check_version, install_hooks

Settings = TypeVar("Settings")


class Adapter(Installation[Settings]):
    """The hooks of this process in one host.

    Args:
        system: the host's name, for messages.
        versions: releases on which the tests run; `0.9` stands for all of 0.9.*. None where the host has no versions.
        remedy: what to do about another release.
        find_version: the release in this environment; None where it cannot be told.

    Attributes:
        settings: what the hooks serve, or None where nothing is installed.
    """

    def __init__(
        self, system: str, *, versions: Sequence[str] = (), remedy: str = "", find_version: Callable[[], str | None]
    ) -> None:
        super().__init__(system)
        self._versions = tuple(versions)
        self._remedy = remedy
        self._find_version = find_version

    @property
    def is_installed(self) -> bool:
        """True while the hooks are in place."""
        return self.settings is not None

    def version(self) -> str:
        """The host and its release, for messages.

        Raises:
            BalanceError: the host is missing, or of a release that is not tested.
        """
        version = self._find_version()
        if version is None:
            return f"{self._system} (of a source folder)"
        if self._versions:
            check_version(version, system=self._system, supported=self._versions, remedy=self._remedy)
        return f"{self._system} {version}"

    def hook(
        self, settings: Settings, rows: Callable[[], Sequence[Hook]], *, check: Callable[[], None] | None = None
    ) -> Adapter[Settings]:
        """Install the table of hooks; with the same settings once.

        Args:
            settings: what the hooks serve, comparable.
            rows: makes the table; called where the release is a tested one.
            check: raises BalanceError where hooks come too late.

        Raises:
            BalanceError: see the invariants above; nothing is changed then.
        """

        def install() -> Patches:
            version = self.version()
            patches = install_hooks(tuple(rows()), version=version)
            try:
                if check is not None:
                    check()
            except BalanceError:
                patches.undo()
                raise
            return patches

        self.install(settings, hook=install)
        return self


def hook_row(
    target: str,
    parameters: str,
    *,
    wrap: Callable[[Function], Function],
    why: str,
    until: str,
    also_in: Sequence[str] = (),
) -> Hook:
    """A row of an adapter's table: a function that is replaced where it is defined.

    Args:
        target: `module:function` or `module:Class.method`.
        parameters: those that the wrapper relies on, with spaces between them.
        wrap: takes the function and returns its replacement.
        why: what the hook is for.
        until: when it can go.
        also_in: further modules that bind it by value.
    """
    module, _, name = target.partition(":")
    owner = f"{module}:{name.rpartition('.')[0]}" if "." in name else module
    return Hook(target, (owner, *also_in), tuple(parameters.split()), wrap, why, until)


def find_version(distribution: str, *, missing: str | None = None) -> str | None:
    """The installed release of a distribution.

    Args:
        distribution: its name.
        missing: what to say where it is not installed; None where it may be used from a source folder.
    """
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError as error:
        if missing is None:
            return None
        raise BalanceError(missing) from error


def check_not_started(actor_class: Any) -> None:
    """Refuses to hook where Ray has pickled an actor's class, which keeps the functions that it started with.

    Raises:
        BalanceError: one was started in this process, in this or an earlier connection.
    """
    ray_metadata = getattr(actor_class, "__ray_metadata__", None)
    if getattr(ray_metadata, "last_export_cluster_and_job", None) is not None:
        name = getattr(ray_metadata, "class_name", "controller")
        raise BalanceError(f"a {name} was started already: install the balancing before it starts.")


def launch(arguments: Sequence[str], *, install: Callable[[], Any], usage: str) -> None:
    """Install, then run `SCRIPT [ARGS …]` or `-m MODULE [ARGS …]` as `__main__`.

    Args:
        arguments: the command line after the adapter's own flags.
        install: hooks the host.
        usage: the command, for messages.

    Raises:
        SystemExit: there is no such script, or the host cannot be hooked.
    """
    as_module = list(arguments[:1]) == ["-m"]
    target, *rest = [*arguments[as_module:], ""]
    if not target or not (as_module or Path(target).is_file()):
        raise SystemExit(f"{f'there is no script {target!r}. ' if target else ''}usage: {usage}")
    sys.argv = [target, *rest[:-1]]
    if not as_module:
        # As Python does for a script; before the host is imported, which may lie beside the script.
        sys.path[0] = str(Path(target).resolve().parent)
    try:
        install()
    except BalanceError as error:
        raise SystemExit(f"megatron_balance: {error}") from error
    if as_module:
        runpy.run_module(target, run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(target, run_name="__main__")
