"""The hook table: checked before anything changes, undone completely, invisible without a flag."""

import argparse
import re
import types
from dataclasses import replace

import pytest

from megatron_balance import BalanceError, hooking
from megatron_balance.mcore import balanced_schedule, bridge, hooks, install_bridge


def test_install_and_undo_restore_the_very_functions():
    from megatron.training import arguments, training

    before = arguments.add_megatron_arguments, training.get_forward_backward_func
    for _ in range(2):
        installed = hooks.install()
        assert training.get_forward_backward_func is not before[1]
        assert hooks.install() is installed  # once more changes nothing
        installed.undo()
        assert (arguments.add_megatron_arguments, training.get_forward_backward_func) == before
        installed.undo()  # nor does undoing twice


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, set()),
        ({"context_parallel_size": 2}, {"_get_batch_on_this_cp_rank_per_sequence_balancing"}),
        ({"num_experts": 4}, {"_apply_expert_bias", "get_tokens_per_expert_and_token_count", "report"}),
        ({"mtp_num_layers": 1}, {"track_mtp_metrics", "process_mtp_loss"}),
        ({"hybrid_layer_pattern": "M*-"}, {"forward"}),
    ],
)
def test_a_run_hooks_what_it_needs_of_megatron_core(options, expected):
    """Fault: twelve hooks in every process, so that one moved target of a feature that is off ended a dense run."""
    names = [re.split("[:.]", hook.target)[-1] for hook in hooks.core_hooks(options)]
    assert sorted(names) == sorted({"forward_step", "backward_step"} | expected)


def test_a_hook_that_upstream_has_made_needless_ends(monkeypatch):
    monkeypatch.setenv("MEGATRON_BALANCE_ANY_VERSION", "1")
    for version, is_hooked in (("0.19.2", True), ("0.20.0", False)):
        targets = [hook.target for hook in hooking.hooks_of_release(hooks.HOOKS, version)]
        assert any("_apply_expert_bias" in target for target in targets) is is_hooked


def test_the_switch_leaves_megatron_as_it_is(monkeypatch, caplog):
    from megatron.training import arguments, training

    monkeypatch.setattr("megatron_balance.hooking._announced_off", set())
    monkeypatch.setenv("MEGATRON_BALANCE", "0")
    monkeypatch.setattr("megatron.core.package_info.__version__", "0.12.1")  # of no concern to a stock run
    before = arguments.add_megatron_arguments, training.get_forward_backward_func, training.evaluate
    for _ in range(2):
        installed = hooks.install()
    parser = arguments.add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    args = parser.parse_args(["--balance-by-flops", "--balance-dynamic-cp"])  # refused without the switch
    assert args.balance_cost == "flops"
    assert (training.get_forward_backward_func, training.evaluate) == before[1:]
    installed.undo()
    assert arguments.add_megatron_arguments is before[0]
    schedule = object()
    assert balanced_schedule(schedule, model=None, max_tokens_per_gpu=1) is schedule
    install_bridge(max_tokens_per_gpu=1).undo()  # Megatron-Bridge is not installed
    messages = [message for message in caplog.messages if message.startswith("MEGATRON_BALANCE")]
    assert messages == [
        f"MEGATRON_BALANCE=0: {system} runs without balancing, and ignores its flags."
        for system in ("Megatron", "Megatron Core", "megatron-bridge")
    ]


@pytest.fixture
def upstream(monkeypatch):
    """A package with one function, bound by value in a second module."""
    origin, user = types.ModuleType("upstream_origin"), types.ModuleType("upstream_user")
    origin.schedule = user.schedule = lambda batch, *, num_parts: num_parts
    monkeypatch.setitem(__import__("sys").modules, "upstream_origin", origin)
    monkeypatch.setitem(__import__("sys").modules, "upstream_user", user)
    return user


HOOK = hooking.Hook(
    target="upstream_origin:schedule",
    bound_in=("upstream_user",),
    parameters=("num_parts",),
    wrap=lambda function: lambda *args, **keywords: -function(*args, **keywords),
    reason="a test",
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
    ],
)
def test_a_target_that_moved_fails_and_changes_nothing(upstream, hook, message):
    before = upstream.schedule
    with pytest.raises(BalanceError, match=message) as error:
        hooking.install_hooks([HOOK, hook], version="upstream 9.9")
    assert "upstream 9.9" in str(error.value)
    assert upstream.schedule is before


class Dispatcher:
    """Stands for an upstream class."""

    def method(self, batch, *, num_parts):
        return len(batch) + num_parts

    @staticmethod
    def static(batch, *, num_parts):
        return len(batch) * num_parts


@pytest.mark.parametrize(("name", "outcome"), [("method", -5), ("static", -6)])
def test_a_method_is_hooked_and_restored(name, outcome):
    before = vars(Dispatcher)[name]
    hook = replace(HOOK, target=f"{__name__}:Dispatcher.{name}", bound_in=())  # where it is defined
    patches = hooking.install_hooks([hook], version="upstream 1.0")
    assert getattr(Dispatcher(), name)([1, 2], num_parts=3) == outcome
    patches.close()
    assert vars(Dispatcher)[name] is before


def test_a_bridge_that_is_missing_is_named():
    with pytest.raises(BalanceError, match=r"pip install megatron-bridge==0\.6\.2\): there is no module"):
        install_bridge(max_tokens_per_gpu=8192)
    assert bridge.bridge_installation.settings is None
