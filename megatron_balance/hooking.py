"""Hooks in other systems: checked tables of them, and the command that runs a script with them in place.

Invariants: a table is installed as a whole or not at all. A target that is missing, has other parameters or was bound
by value where its row does not say so fails on every rank before training, with the version. Installing twice with the
same settings installs once; other settings raise and change nothing. `undo()` restores the very objects, also where
other code has replaced them since.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import inspect
import logging
import os
import re
import runpy
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Generic, TypeVar

from megatron_balance.errors import BalanceError, RefusedError

Settings = TypeVar("Settings")
Row = TypeVar("Row", bound=Any)
Function = Callable[..., Any]

ANY_VERSION = "MEGATRON_BALANCE_ANY_VERSION"
"""Environment variable: 1 in every process allows other releases, of all systems; hooks are still checked."""

SWITCH = "MEGATRON_BALANCE"
"""Environment variable: 0 in every process turns balancing off, whatever flags and scripts say."""


_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


@dataclass(frozen=True, kw_only=True)
class Hook:
    """One function or method to wrap.

    Attributes:
        target: `module:function` or `module:Class.method` where it is defined; a method may be static.
        wrap: takes the function and returns its replacement.
        reason: what the hook is for.
        bound_in: where the attribute of that name is replaced, `module` or `module:Class`: those that look it up
            when they call it; by default where it is defined.
        parameters: parameters of the target that the wrapper relies on.
        first: the first release that has the target, `major.minor`.
        last: the last one that needs the hook.
        needed: when a run needs it, in the words of the system's own table of options; empty for always.
    """

    target: str
    wrap: Callable[[Function], Function]
    reason: str
    bound_in: tuple[str, ...] = ()
    parameters: tuple[str, ...] = ()
    first: str = "0"
    last: str = "999"
    needed: str = ""

    @classmethod
    def around(cls, target: str, balanced: Function, *settings: Any, **attributes: Any) -> Hook:
        """A hook that calls `balanced(*settings, stock, …)`, whose named parameters are those it relies on."""
        parameters = [*inspect.signature(balanced).parameters.values()][len(settings) + 1 :]
        names = [parameter.name for parameter in parameters if parameter.kind in _BY_NAME]

        def wrap(stock: Function) -> Function:
            @functools.wraps(stock)
            def wrapper(*positional: Any, **keywords: Any) -> Any:
                return balanced(*settings, stock, *positional, **keywords)

            return wrapper

        return cls(target=target, wrap=wrap, **{"parameters": tuple(names), **attributes})

    @property
    def home(self) -> str:
        """The module, or `module:Class`, that defines the target."""
        return self.target.rpartition("." if "." in self.target.partition(":")[2] else ":")[0]

    @property
    def places(self) -> tuple[str, ...]:
        """`bound_in` or its default."""
        return self.bound_in or (self.home,)


@contextlib.contextmanager
def quiet_imports() -> Iterator[None]:
    """Import Megatron without its forty lines on kernels that are not installed: `doctor` reports these."""
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def install_hooks(hooks: Sequence[Hook], *, version: str) -> contextlib.ExitStack:
    """Check all hooks, then install them, or raise BalanceError; `version` names the patched package in messages.

    `close()` of what it returns restores the original objects.
    """
    bindings: list[tuple[Any, str, Any, Any]] = []
    for hook in hooks:
        try:
            bindings += _bindings(hook)
        except LookupError as error:
            raise BalanceError(
                f"cannot hook {hook.target} in {version}: {error.args[0]}. Use a supported version, or train without "
                "balancing."
            ) from error
    patches = contextlib.ExitStack()
    for owner, name, original, wrapped in bindings:
        setattr(owner, name, wrapped)
        patches.callback(setattr, owner, name, original)
    return patches


def _bindings(hook: Hook) -> list[tuple[Any, str, Any, Any]]:
    """Of each place the module or class, the name there, the object that it has, and what replaces it."""
    home, name = hook.home, hook.target[len(hook.home) + 1 :]
    target = vars(_owner(home, name)).get(name)
    if not callable(target):
        raise LookupError(f"{home} has no function {name}")
    parameters = inspect.signature(target).parameters
    if missing := [name for name in hook.parameters if name not in parameters]:
        raise LookupError(f"it no longer takes {', '.join(missing)}")
    wrapped: Any = hook.wrap(target)
    if isinstance(target, staticmethod):
        wrapped = staticmethod(wrapped)
    owners = [_owner(place, name) for place in hook.places]
    for place, owner in zip(hook.places, owners, strict=True):
        if vars(owner).get(name) is not target:
            raise LookupError(f"{place}.{name} is not that function (replaced, or imported otherwise)")
    return [(owner, name, target, wrapped) for owner in owners]


def _owner(path: str, name: str) -> Any:
    """The module, or `module:Class`, that has this name.

    `@ray.remote` leaves an `ActorClass` object under the class's name. It keeps a subclass of the plain class, in which
    it wraps every method to trace it, and pickles both by value into the actor's process when the first actor starts.
    Patches made before that reach the actor, but only those on the subclass: its methods hide those of the plain class.
    """
    module_name, _, class_name = path.partition(":")
    try:
        owner = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise LookupError(f"there is no module {error.name}") from error
    if class_name:
        owner = getattr(owner, class_name, None)
        if ray_metadata := getattr(owner, "__ray_metadata__", None):
            # Where Ray does not trace, the subclass has no methods of its own.
            classes = ray_metadata.modified_class.__mro__
            owner = next((owner for owner in classes if name in vars(owner)), classes[0])
        if not inspect.isclass(owner):
            raise LookupError(f"{module_name} has no class {class_name}")
    return owner


class Installation(Generic[Settings]):
    """The hooks of this process in one system, and the settings that they serve.

    Args:
        system: its name, and that of its distribution where pip knows it.
        remedy: what to do about another release, or about a source folder that is not as expected.
        versions: releases on which the tests run; `0.9` stands for all of 0.9.*, none for any.
        version_of: gives the version of the system, None in a source folder; by default pip's.

    Attributes:
        settings: None where nothing is installed.
    """

    def __init__(
        self,
        system: str,
        *,
        remedy: str,
        versions: Sequence[str] = (),
        version_of: Callable[[str], str | None] | None = None,
    ) -> None:
        self.settings: Settings | None = None
        self._system, self._remedy, self._versions = system, remedy, tuple(versions)
        self._version_of = version_of or _version_of_distribution
        self._in_place = contextlib.ExitStack()

    def is_installed(self) -> bool:
        """True while the hooks are in place."""
        return self.settings is not None

    def version(self) -> str | None:
        """The system's version, None in a source folder; BalanceError for an untested one, unless ANY_VERSION is 1."""
        version, tested = self._version_of(self._system), self._versions
        is_tested = version is None or version in tested or version.startswith(tuple(f"{name}." for name in tested))
        if tested and not is_tested and os.environ.get(ANY_VERSION) != "1":
            raise BalanceError(
                f"{self._system} is {version}; megatron_balance is tested on {', '.join(tested)}: {self._remedy}, or "
                f"set {ANY_VERSION}=1 in every process to try this one."
            )
        return version

    def install(
        self, settings: Settings, rows: Callable[[], Sequence[Hook]], *, end: Callable[[], None] | None = None
    ) -> Installation[Settings]:
        """Install a table of hooks; with the same settings once.

        Where balancing is switched off nothing is installed, and a line of the log says so.

        Args:
            settings: what the hooks serve, comparable.
            rows: makes the table, of which the rows of the system's release are installed; called where that is a
                tested one. It may refuse first, by a BalanceError.
            end: what `undo` calls last, once no hook is in place.

        Raises:
            BalanceError: an untested release, a target that is not as expected, or hooks for other settings in place;
                nothing is changed then.
        """
        if is_off(self._system):
            return self
        if self.settings is None:
            patches = self._patches(rows)
            if end is not None:
                self._in_place.callback(end)
            self.add(patches)
            self.settings = settings
        elif settings != self.settings:
            raise BalanceError(f"{self._system} is hooked already with {self.settings}: undo() that before {settings}.")
        return self

    def install_late(self, rows: Callable[[], Sequence[Hook]]) -> None:
        """Install the rows of a table whose modules were loaded since `install`, with its errors."""
        self.add(self._patches(rows))

    def add(self, patches: contextlib.ExitStack) -> None:
        """Have `undo` remove these first."""
        self._in_place.enter_context(patches)

    def undo(self) -> None:
        """Remove the hooks, the latest first."""
        self._in_place.close()
        self.settings = None

    def _patches(self, rows: Callable[[], Sequence[Hook]]) -> contextlib.ExitStack:
        version = self.version()
        if version is None:
            return install_hooks(rows(), version=f"{self._system} (of a source folder; {self._remedy})")
        return install_hooks(hooks_of_release(rows(), version), version=f"{self._system} {version}")


def _version_of_distribution(system: str) -> str | None:
    try:
        return metadata.version(system)
    except metadata.PackageNotFoundError:
        return None


def hooks_of_release(hooks: Sequence[Row], version: str) -> list[Row]:
    """The hooks, or other rows with their releases, whose targets a release has, and which it needs."""

    def numbers(release: str) -> list[int]:
        return [int(number) for number in re.findall(r"\d+", release)[:2]]

    return [hook for hook in hooks if numbers(hook.first) <= numbers(version) <= numbers(hook.last)]


def is_off(system: str) -> bool:
    """True where the environment switches balancing off; the first rank says so once."""
    is_zero = os.environ.get(SWITCH) == "0"
    if is_zero and os.environ.get("RANK", "0") == "0" and system not in _announced_off:
        _announced_off.add(system)
        logging.getLogger(__name__).warning("%s=0: %s runs without balancing, and ignores its flags.", SWITCH, system)
    return is_zero


_announced_off: set[str] = set()


@contextlib.contextmanager
def patched_attrs(target: Any, **values: Any) -> Iterator[None]:
    """Give attributes of an object these values within the context, as `mock.patch.object` does."""
    stock = {name: getattr(target, name, None) for name in values}
    for name, value in values.items():
        setattr(target, name, value)
    try:
        yield
    finally:
        for name, value in stock.items():
            setattr(target, name, value)


def check_not_started(actor_class: Any) -> None:
    """Refuses to hook where Ray has pickled an actor's class, which keeps the functions that it started with.

    Raises:
        BalanceError: one was started in this process, in this or an earlier connection.
    """
    ray_metadata = getattr(actor_class, "__ray_metadata__", None)
    if getattr(ray_metadata, "last_export_cluster_and_job", None) is not None:
        name = getattr(ray_metadata, "class_name", "controller")
        raise BalanceError(f"a {name} was started already: install the balancing before it starts.")


def launch(adapter: str, *, command: str | None = None, epilog: str = "") -> None:
    """The command `python -m ADAPTER [FLAGS] (SCRIPT | -m MODULE) [ARGS …]`: installs, then runs the target as main.

    Flags are the options of the adapter's `install`, with their defaults.

    Args:
        adapter: the module that has `install`.
        command: the module that was run, where it is not the adapter.
        epilog: what --help ends with.

    Raises:
        SystemExit: there is no such script, the host cannot be hooked, or flags are refused while they are parsed. The
            target's other errors pass as they are.
    """
    try:
        install = importlib.import_module(adapter).install
    except ImportError as error:
        raise SystemExit(f"megatron_balance: {adapter} needs what it balances in this environment: {error}.") from error
    parser = argparse.ArgumentParser(prog=f"python -m {command or adapter}", allow_abbrev=False, epilog=epilog)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    options = inspect.signature(install).parameters
    for name, parameter in options.items():
        flag, default = f"--{name.replace('_', '-')}", parameter.default
        if isinstance(default, bool):
            parser.add_argument(flag, dest=name, action="store_true")
        else:
            kind = str if default is None else type(default)
            parser.add_argument(flag, dest=name, type=kind, default=default, help=f"by default {default}")
    parser.add_argument("-m", dest="as_module", action="store_true", help="the target is a module, not a file")
    parser.add_argument("target", help="script or module to run")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="its arguments")
    flags = parser.parse_args()
    target = flags.target
    sys.argv = [target, *flags.arguments]
    if not flags.as_module:
        if not Path(target).is_file():
            parser.error(f"there is no script {target!r}")
        # As Python does for a script; before the host is imported, which may lie beside the script.
        sys.path[0] = str(Path(target).resolve().parent)
    try:
        install(**{name: getattr(flags, name) for name in options})
    except BalanceError as error:
        raise SystemExit(f"megatron_balance: {error}") from error
    try:
        if flags.as_module:
            runpy.run_module(target, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(target, run_name="__main__")
    except RefusedError as error:
        raise SystemExit(f"megatron_balance: {error}") from error
