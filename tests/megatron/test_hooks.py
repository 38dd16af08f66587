"""The hook table: checked before anything changes, undone completely, invisible without a flag."""

from __future__ import annotations

import argparse
import types
from dataclasses import replace

import pytest

from megatron_balance import BalanceError, hooking
from megatron_balance.mcore import hooks


def test_install_and_undo_restore_the_very_functions() -> None:
    from megatron.training import arguments, training

    before = arguments.add_megatron_arguments, training.get_forward_backward_func
    for _ in range(2):
        installed = hooks.install()
        assert training.get_forward_backward_func is not before[1]
        assert hooks.install() is installed  # once more changes nothing
        installed.undo()
        assert (arguments.add_megatron_arguments, training.get_forward_backward_func) == before
        installed.undo()  # nor does undoing twice


@pytest.mark.parametrize("core_first", [True, False])
def test_hooks_for_a_loop_of_ones_own_are_put_in_place_once(core_first: bool) -> None:
    from megatron.core.pipeline_parallel import schedules
    from megatron.training import training

    stock = schedules.backward_step
    installs = [hooks.install_core, hooks.install]
    placed = [install() for install in (installs if core_first else reversed(installs))]
    assert schedules.backward_step.__wrapped__ is stock  # type: ignore[attr-defined]
    assert training.get_forward_backward_func is not schedules.get_forward_backward_func
    for installed in reversed(placed):
        installed.undo()
    assert schedules.backward_step is stock
    assert training.get_forward_backward_func is schedules.get_forward_backward_func


def test_without_a_flag_megatron_gets_its_own_schedule(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.core.pipeline_parallel import schedules
    from megatron.training import arguments, global_vars, training

    installed = hooks.install()
    parser = arguments.add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    monkeypatch.setattr(global_vars, "_GLOBAL_ARGS", parser.parse_args([]))
    try:
        assert training.get_forward_backward_func(1, None) is schedules.forward_backward_no_pipelining
        assert hooks.current() is None
    finally:
        installed.undo()


def test_an_unsupported_version_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron.core.package_info.__version__", "0.12.1")
    with pytest.raises(BalanceError, match=r"megatron-core is 0\.12\.1; .* tested on 0\.17, 0\.18, 0\.19"):
        hooks.install()


@pytest.fixture
def upstream(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """A package with one function, bound by value in a second module."""
    origin, user = types.ModuleType("upstream_origin"), types.ModuleType("upstream_user")
    origin.schedule = user.schedule = lambda batch, *, num_parts: num_parts  # type: ignore[attr-defined]
    monkeypatch.setitem(__import__("sys").modules, "upstream_origin", origin)
    monkeypatch.setitem(__import__("sys").modules, "upstream_user", user)
    return user


HOOK = hooking.Hook(
    target="upstream_origin:schedule",
    bound_in=("upstream_user",),
    parameters=("num_parts",),
    wrap=lambda function: lambda *args, **keywords: -function(*args, **keywords),
    why="a test",
    until="it passes",
)


@pytest.mark.parametrize(
    ("hook", "message"),
    [
        (replace(HOOK, target="upstream_origin:gone"), "upstream_origin has no function gone"),
        (replace(HOOK, target="upstream_gone:schedule"), "there is no module upstream_gone"),
        (replace(HOOK, parameters=("num_parts", "weights")), "no longer takes weights"),
        (replace(HOOK, bound_in=("upstream_user", "json")), "json.schedule is not that function"),
        (replace(HOOK, target=f"{__name__}:Gone.method", bound_in=()), "has no class Gone"),
        (replace(HOOK, target=f"{__name__}:Dispatcher.gone", bound_in=()), "Dispatcher has no function gone"),
        (replace(HOOK, target=f"{__name__}:Dispatcher.static", bound_in=()), "Dispatcher has no function static"),
    ],
)
def test_a_target_that_moved_fails_and_changes_nothing(
    upstream: types.ModuleType, hook: hooking.Hook, message: str
) -> None:
    before = upstream.schedule
    with pytest.raises(BalanceError, match=message) as error:
        hooking.install_hooks([HOOK, hook], version="upstream 9.9")
    assert "upstream 9.9" in str(error.value)
    assert upstream.schedule is before


def test_undo_refuses_when_someone_else_has_wrapped_since(upstream: types.ModuleType) -> None:
    patches = hooking.install_hooks([HOOK], version="upstream 1.0")
    assert upstream.schedule([], num_parts=2) == -2
    ours = upstream.schedule
    upstream.schedule = lambda *args, **keywords: 0  # type: ignore[attr-defined]
    with pytest.raises(BalanceError, match="was replaced after it was hooked"):
        patches.undo()
    upstream.schedule = ours  # type: ignore[attr-defined]
    patches.undo()
    assert upstream.schedule([], num_parts=2) == 2


class Dispatcher:
    """Stands for an upstream class."""

    def method(self, batch: list[int], *, num_parts: int) -> int:
        return len(batch) + num_parts

    @staticmethod
    def static(batch: list[int], *, num_parts: int) -> int:
        return len(batch) * num_parts


def test_a_method_is_hooked_and_restored() -> None:
    before = Dispatcher.method
    hook = replace(HOOK, target=f"{__name__}:Dispatcher.method", bound_in=())  # where it is defined
    patches = hooking.install_hooks([hook], version="upstream 1.0")
    assert Dispatcher().method([1, 2], num_parts=3) == -5
    patches.undo()
    assert Dispatcher.method is before
