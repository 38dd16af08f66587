"""Runs a script with the hooks of an adapter in place, and refuses to hook what Ray has pickled already."""

from __future__ import annotations

import argparse
import importlib
import inspect
import runpy
import sys
from pathlib import Path
from typing import Any

from megatron_balance.errors import BalanceError, RefusedError


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
        SystemExit: there is no such script, the host cannot be hooked, or flags are refused while they are parsed. The
            target's other errors pass as they are.
    """
    try:
        install = importlib.import_module(adapter).install
    except ImportError as error:
        raise SystemExit(f"megatron_balance: {adapter} needs what it balances in this environment: {error}.") from error
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
    except BalanceError as error:
        raise SystemExit(f"megatron_balance: {error}") from error
    try:
        if as_module:
            runpy.run_module(target, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(target, run_name="__main__")
    except RefusedError as error:
        raise SystemExit(f"megatron_balance: {error}") from error
