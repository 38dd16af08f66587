"""Hooks in other systems: checked tables of them, installed together or not at all, and undone.

A target that is missing, has other parameters, or was bound by value somewhere the row does not name, fails on every
rank before training, with the version seen. Installing twice with the same settings installs once, other settings raise
and change nothing; `undo()` restores the very objects that were there, as `holding` does.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import logging
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import Any, Generic, Protocol, TypeVar

from megatron_balance.errors import BalanceError

__all__ = [
    "ANY_VERSION",
    "Adapter",
    "Function",
    "Hook",
    "Installation",
    "Patches",
    "check_version",
    "holding",
    "install_hooks",
    "quiet_imports",
]

Settings = TypeVar("Settings")
Function = Callable[..., Any]

ANY_VERSION = "MEGATRON_BALANCE_ANY_VERSION"
"""Environment variable: 1 in every process allows other releases, of all systems; hooks are still checked."""

SWITCH = "MEGATRON_BALANCE"
"""Environment variable: 0 in every process turns balancing off, whatever flags and scripts say."""


@dataclass(frozen=True, kw_only=True)
class Hook:
    """One function or method to wrap.

    Attributes:
        target: `module:function` or `module:Class.method` where it is defined; a method may be static.
        wrap: takes the function and returns its replacement.
        why: what the hook is for.
        until: when it can go.
        bound_in: where the attribute of that name is replaced, `module` or `module:Class`: those that look it up
            when they call it; by default where it is defined.
        owner: gives the class whose attribute is replaced, where the target's module has something else by its name.
        parameters: parameters of the target that the wrapper relies on.
        first: the first release that has the target, as `(major, minor)`.
        last: the last one that needs the hook.
        needed: when a run needs it, in the words of the system's own table of options; empty for always.
        late: modules that are not loaded are left out, as are names bound to a hook already (`while_installed`): the
            table can be installed again once more modules are loaded.
    """

    target: str
    wrap: Callable[[Function], Function]
    why: str
    until: str
    bound_in: tuple[str, ...] = ()
    owner: Callable[[], Any] | None = None
    parameters: tuple[str, ...] = ()
    first: tuple[int, int] = (0, 0)
    last: tuple[int, int] = (999, 0)
    needed: str = ""
    late: bool = False

    @property
    def home(self) -> str:
        """The module, or `module:Class`, that defines the target."""
        return self.target.rpartition("." if "." in self.target.partition(":")[2] else ":")[0]

    @property
    def places(self) -> tuple[str, ...]:
        """`bound_in` or its default."""
        return self.bound_in or (self.home,)

    def is_in(self, release: tuple[int, ...]) -> bool:
        """True if a release has the target, and needs the hook."""
        return self.first <= release[:2] <= self.last


_MARK = "is_balance_hook"

_Binding = tuple[Any, str, Any, Any]
"""The module or class, the name there, the object that it had, and that which it has now."""


class Patches:
    """Puts objects in the place of others. `undo()` restores those, last first."""

    def __init__(self, bindings: list[_Binding]) -> None:
        self._bindings = bindings
        for owner, name, _, wrapped in bindings:
            setattr(owner, name, wrapped)

    def undo(self) -> None:
        """Restore the original objects.

        Raises:
            BalanceError: someone else has replaced one of them since; nothing is changed then.
        """
        for owner, name, _, wrapped in self._bindings:
            if vars(owner).get(name) is not wrapped:
                raise BalanceError(f"{owner.__name__}.{name} was replaced after it was hooked: undo that first.")
        while self._bindings:
            owner, name, original, _ = self._bindings.pop()
            setattr(owner, name, original)


@contextlib.contextmanager
def quiet_imports() -> Iterator[None]:
    """Import Megatron without its forty lines on kernels that are not installed: `doctor` reports these."""
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def install_hooks(hooks: Sequence[Hook], *, version: str) -> Patches:
    """Check all hooks, then install them; `version` is the name and version of the patched package, for messages.

    Raises:
        BalanceError: a target is missing or not as expected; nothing is changed then.
    """
    bindings: list[_Binding] = []
    for hook in hooks:
        try:
            bindings += _bindings(hook)
        except LookupError as error:
            raise BalanceError(
                f"cannot hook {hook.target} in {version}: {error.args[0]}. Use a supported version, or train without "
                "balancing."
            ) from error
    return Patches(bindings)


def _bindings(hook: Hook) -> list[_Binding]:
    home, name = hook.home, hook.target[len(hook.home) + 1 :]
    places = [place for place in hook.places if not (hook.late and _is_done(place, name))]
    if not places:
        return []
    owners = [hook.owner() if hook.owner else _owner(place) for place in places]
    if hook.owner and not inspect.isclass(owners[0]):
        raise LookupError(f"there is no class {home}")
    target = vars(owners[0] if hook.owner else _owner(home)).get(name)
    if not callable(target):
        raise LookupError(f"{home} has no function {name}")
    taken = inspect.signature(target).parameters
    if missing := [parameter for parameter in hook.parameters if parameter not in taken]:
        raise LookupError(f"it no longer takes {', '.join(missing)}")
    wrapped: Any = hook.wrap(target)
    if isinstance(target, staticmethod):
        wrapped = staticmethod(wrapped)
    for place, owner in zip(places, owners, strict=True):
        if vars(owner).get(name) is not target:
            raise LookupError(f"{place}.{name} is not that function (replaced, or imported otherwise)")
    return [(owner, name, target, wrapped) for owner in owners]


def _is_done(place: str, name: str) -> bool:
    """True if a module is not loaded, or its name is bound to a hook of `while_installed` already."""
    module, _, class_name = place.partition(":")
    loaded = sys.modules.get(module)
    owner = getattr(loaded, class_name, None) if class_name else loaded
    return loaded is None or getattr(getattr(owner, name, None), _MARK, False)


def _owner(path: str) -> Any:
    """The module, or `module:Class`."""
    module_name, _, class_name = path.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise LookupError(f"there is no module {error.name}") from error
    if class_name and not inspect.isclass(getattr(module, class_name, None)):
        raise LookupError(f"{module_name} has no class {class_name}")
    return getattr(module, class_name) if class_name else module


class Undoable(Protocol):
    """Something installed that can be removed: `Patches`, or an entry in a system's registry."""

    def undo(self) -> None: ...  # a BalanceError where someone else has wrapped it since, and nothing is changed


class Installation(Generic[Settings]):
    """The hooks of this process in one system, and the settings that they serve; None where nothing is installed."""

    def __init__(self, system: str) -> None:
        self.settings: Settings | None = None
        self._system = system
        self._in_place: list[Undoable] = []

    def install(self, settings: Settings, *, hook: Callable[[], Undoable]) -> Installation[Settings]:
        """Install hooks that serve these settings; `hook` installs all of them, or raises and changes nothing.

        Where balancing is switched off nothing is installed, and a line of the log says so.

        Raises:
            BalanceError: hooks for other settings are installed; nothing is changed then.
        """
        if is_off(self._system):
            return self
        if self.settings is None:
            self._in_place, self.settings = [hook()], settings
        elif settings != self.settings:
            raise BalanceError(f"{self._system} is hooked already with {self.settings}: undo() that before {settings}.")
        return self

    def while_installed(self, stock: Function, balanced: Function) -> Function:
        """A hook for modules that may be loaded, and bind it by value, at any time: for these `undo` comes too late.

        It calls `balanced`, with the settings first, while hooks are installed, and else the stock function.
        """

        @functools.wraps(stock)
        def hook(*positional: Any, **keywords: Any) -> Any:
            settings = self.settings
            if settings is None:
                return stock(*positional, **keywords)
            return balanced(settings, *positional, **keywords)

        vars(hook)[_MARK] = True
        return hook

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


def is_off(system: str) -> bool:
    """True where the environment switches balancing off; the first rank says so once."""
    is_zero = os.environ.get(SWITCH) == "0"
    if is_zero and os.environ.get("RANK", "0") == "0" and system not in _said_off:
        _said_off.add(system)
        logging.getLogger(__name__).warning("%s=0: %s runs without balancing, and ignores its flags.", SWITCH, system)
    return is_zero


_said_off: set[str] = set()


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


def check_version(version: str, *, system: str, supported: Sequence[str], remedy: str) -> str:
    """Returns the version of a system, where the tests run on it or ANY_VERSION is set; `0.9` stands for all of 0.9.*.

    Raises:
        BalanceError: it is another; names the tested ones, the remedy and ANY_VERSION.
    """
    tested = version in supported or version.startswith(tuple(f"{release}." for release in supported))
    if not tested and os.environ.get(ANY_VERSION) != "1":
        raise BalanceError(
            f"{system} is {version}; megatron_balance is tested on {', '.join(supported)}: {remedy}, or set "
            f"{ANY_VERSION}=1 in every process to try this one."
        )
    return version


@contextlib.contextmanager
def holding(target: Any, **values: Any) -> Iterator[None]:
    """Have attributes of an object hold these values in this context."""
    stock = {name: getattr(target, name, None) for name in values}
    for name, value in values.items():
        setattr(target, name, value)
    try:
        yield
    finally:
        for name, value in stock.items():
            setattr(target, name, value)
