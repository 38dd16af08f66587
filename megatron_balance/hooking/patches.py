"""Installs a table of hooks together or not at all, after checking each, and undoes them.

A hook is a row: the target, the parameters relied on, where its name is bound, why, and when the row
can go. Installing checks every row first. A target that is missing, has other parameters, or was bound
by value somewhere the row does not name, fails on every rank before training, with the version seen.

Invariants: either every hook of a table is installed or none; installing twice installs once; `undo()`
restores the very objects that were there.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_balance.errors import BalanceError

Function = Callable[..., Any]


@dataclass(frozen=True, kw_only=True)
class Hook:
    """One function or method to wrap.

    Attributes:
        target: `module:function` or `module:Class.method` where it is defined.
        wrap: takes the function and returns its replacement.
        why: what the hook is for.
        until: when it can go.
        bound_in: where the attribute of that name is replaced, `module` or `module:Class`: those that look it up
            when they call it; by default where it is defined.
        parameters: parameters of the target that the wrapper relies on.
        first: the first release that has the target, as `(major, minor)`.
    """

    target: str
    wrap: Callable[[Function], Function]
    why: str
    until: str
    bound_in: tuple[str, ...] = ()
    parameters: tuple[str, ...] = ()
    first: tuple[int, int] = (0, 0)

    @property
    def home(self) -> str:
        """The module, or `module:Class`, that defines the target."""
        return self.target.rpartition("." if "." in self.target.partition(":")[2] else ":")[0]

    @property
    def places(self) -> tuple[str, ...]:
        """`bound_in` or its default."""
        return self.bound_in or (self.home,)

    def is_in(self, release: tuple[int, int]) -> bool:
        """True if a release has the target."""
        return self.first <= release


@dataclass(frozen=True)
class _Binding:
    owner: Any
    name: str
    original: Any
    wrapped: Any


class Patches:
    """Installed hooks. `undo()` removes them, last first."""

    def __init__(self, bindings: list[_Binding]) -> None:
        self._bindings = bindings

    def undo(self) -> None:
        """Restore the original functions.

        Raises:
            BalanceError: someone else has wrapped one of them since; nothing is changed then.
        """
        for binding in self._bindings:
            if vars(binding.owner).get(binding.name) is not binding.wrapped:
                raise BalanceError(
                    f"{binding.owner.__name__}.{binding.name} was replaced after it was hooked: undo that first."
                )
        while self._bindings:
            binding = self._bindings.pop()
            setattr(binding.owner, binding.name, binding.original)


def install(hooks: Sequence[Hook], *, version: str) -> Patches:
    """Check all hooks, then install them; `version` is the name and version of the patched package, for messages.

    Raises:
        BalanceError: a target is missing or not as expected; nothing is changed then.
    """
    bindings: list[_Binding] = []
    for hook in hooks:
        home, name = _owner(hook.home, hook=hook, version=version), hook.target[len(hook.home) + 1 :]
        # As it is stored: a static method is unwrapped before it is wrapped, and wrapped again after.
        stored = vars(home).get(name)
        static = isinstance(stored, staticmethod)
        target = stored.__func__ if static else stored
        if not callable(target):
            raise _moved(hook, f"{home.__name__} has no function {name}", version)
        missing = [parameter for parameter in hook.parameters if parameter not in inspect.signature(target).parameters]
        if missing:
            raise _moved(hook, f"it no longer takes {', '.join(missing)}", version)
        wrapped = staticmethod(hook.wrap(target)) if static else hook.wrap(target)
        for bound_in in hook.places:
            owner = _owner(bound_in, hook=hook, version=version)
            if vars(owner).get(name) is not stored:
                raise _moved(hook, f"{bound_in}.{name} is not that function (replaced, or imported otherwise)", version)
            bindings.append(_Binding(owner, name, stored, wrapped))
    for binding in bindings:
        setattr(binding.owner, binding.name, binding.wrapped)
    return Patches(bindings)


def _owner(path: str, *, hook: Hook, version: str) -> Any:
    """The module, or `module:Class`."""
    module_name, _, class_name = path.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise _moved(hook, f"there is no module {error.name}", version) from error
    if not class_name:
        return module
    owner = getattr(module, class_name, None)
    if not inspect.isclass(owner):
        raise _moved(hook, f"{module_name} has no class {class_name}", version)
    return owner


def _moved(hook: Hook, what: str, version: str) -> BalanceError:
    return BalanceError(
        f"cannot hook {hook.target} in {version}: {what}. Use a supported version, or train without balancing."
    )
