"""Installs the hooks of one adapter in this process, and runs a script with them in place.

Invariants: importing an adapter patches nothing; either all hooks are in place or none; an untested version, a target
that moved or hooks for other settings are refused by name; `undo()` restores the very objects.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import re
import runpy
import sys
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

from megatron_balance.errors import BalanceError
from megatron_balance.hooking import Hook, Installation, Patches, check_version, install_hooks

Settings = TypeVar("Settings")


class Adapter(Installation[Settings]):
    """The hooks of this process in one host.

    Args:
        system: the host's name, and its distribution's where pip knows it.
        versions: releases on which the tests run; `0.9` stands for all of 0.9.*.
        remedy: what to do about another release, or about a source folder that is not as expected.

    Attributes:
        settings: what the hooks serve, or None where nothing is installed.
    """

    def __init__(self, system: str, *, versions: Sequence[str] = (), remedy: str) -> None:
        super().__init__(system)
        self._versions = tuple(versions)
        self._remedy = remedy

    def is_installed(self) -> bool:
        """True while the hooks are in place."""
        return self.settings is not None

    def hook(self, settings: Settings, rows: Callable[[], Sequence[Hook]]) -> Adapter[Settings]:
        """Install the table of hooks; with the same settings once.

        Args:
            settings: what the hooks serve, comparable.
            rows: makes the table, of which the rows of the host's release are installed; called where that is a tested
                one. It may refuse first, by a BalanceError.

        Raises:
            BalanceError: see the invariants above; nothing is changed then.
        """
        self.install(settings, hook=lambda: self._install(rows))
        return self

    def hook_late(self, rows: Callable[[], Sequence[Hook]]) -> None:
        """Install the rows of a table, all `late`, whose modules were loaded since; errors as of `hook`."""
        self.add(self._install(rows))

    def _install(self, rows: Callable[[], Sequence[Hook]]) -> Patches:
        try:
            version = metadata.version(self._system)
        except metadata.PackageNotFoundError:
            return install_hooks(rows(), version=f"{self._system} (of a source folder; {self._remedy})")
        if self._versions:
            check_version(version, system=self._system, supported=self._versions, remedy=self._remedy)
        release = tuple(int(number) for number in re.findall(r"\d+", version)[:2])
        return install_hooks([row for row in rows() if row.is_in(release)], version=f"{self._system} {version}")


def check_not_started(actor_class: Any) -> None:
    """Refuses to hook where Ray has pickled an actor's class, which keeps the functions that it started with.

    Raises:
        BalanceError: one was started in this process, in this or an earlier connection.
    """
    ray_metadata = getattr(actor_class, "__ray_metadata__", None)
    if getattr(ray_metadata, "last_export_cluster_and_job", None) is not None:
        name = getattr(ray_metadata, "class_name", "controller")
        raise BalanceError(f"a {name} was started already: install the balancing before it starts.")


def launch(adapter: str, *, prefix: str = "", module: str | None = None, command: str | None = None) -> None:
    """The command `python -m ADAPTER [FLAGS] (SCRIPT | -m MODULE) [ARGS …]`: installs, then runs the target as main.

    Flags are the options of the adapter's `install`, with their defaults.

    Args:
        adapter: the module that has `install`.
        prefix: of the flags' names, where the host has flags of the same names.
        module: what always runs in place of a script; all flags that are not the adapter's are its own.
        command: the module that was run, where it is not the adapter.

    Raises:
        SystemExit: there is no such script, the host cannot be hooked, or the target raised a BalanceError.
    """
    install = importlib.import_module(adapter).install
    parser = argparse.ArgumentParser(
        prog=f"python -m {command or adapter}", add_help=module is None, allow_abbrev=False
    )
    options = inspect.signature(install).parameters
    for name, parameter in options.items():
        flag, default = f"--{prefix}{name.replace('_', '-')}", parameter.default
        if isinstance(default, bool):
            parser.add_argument(flag, dest=name, action="store_true")
        else:
            kind = str if default is None else type(default)
            parser.add_argument(flag, dest=name, type=kind, default=default, help=f"by default {default}")
    if module is None:
        parser.add_argument("-m", dest="as_module", action="store_true", help="the target is a module, not a file")
        parser.add_argument("target", help="script or module to run")
        parser.add_argument("arguments", nargs=argparse.REMAINDER, help="its arguments")
        flags = parser.parse_args()
        as_module, target, arguments = flags.as_module, flags.target, flags.arguments
    else:
        flags, arguments = parser.parse_known_args()
        as_module, target = True, module
    if not as_module and not Path(target).is_file():
        parser.error(f"there is no script {target!r}")
    sys.argv = [target, *arguments]
    if not as_module:
        # As Python does for a script; before the host is imported, which may lie beside the script.
        sys.path[0] = str(Path(target).resolve().parent)
    try:
        install(**{name: getattr(flags, name) for name in options})
        if as_module:
            runpy.run_module(target, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(target, run_name="__main__")
    except BalanceError as error:
        raise SystemExit(f"megatron_balance: {error}") from error
