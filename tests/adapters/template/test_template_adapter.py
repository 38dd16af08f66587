"""The template: two ranks with very different data run nearly the same number of tokens, every sequence once."""

import importlib.metadata

import pytest
import torch
import torch.distributed as dist
import toy_host
from gloo_ranks import run_ranks

from megatron_balance import BalanceError
from megatron_balance.adapters import template

LENGTHS = ([16, 15, 14, 13], [1, 2, 3, 4])
CAP = 20


def run_rank() -> list[list[list[int]]]:
    """The tokens of each micro-batch of this rank."""
    template.install(max_tokens=CAP)
    loader = toy_host.Loader([torch.full((length,), length) for length in LENGTHS[dist.get_rank()]])
    slots = toy_host.train_step(loader, dist.group.WORLD)
    return [[sequence.tolist() for sequence in slot] for slot in slots]


def test_samples_move_by_plan_and_each_runs_once() -> None:
    slots_of = run_ranks(2, "test_template_adapter:run_rank")
    runs = [sequence for slots in slots_of for slot in slots for sequence in slot]
    assert sorted(runs) == sorted([length] * length for lengths in LENGTHS for length in lengths)
    assert len({len(slots) for slots in slots_of}) == 1
    assert all(sum(map(len, slot)) <= CAP for slots in slots_of for slot in slots)
    tokens_of = [sum(len(sequence) for slot in slots for sequence in slot) for slots in slots_of]
    assert tokens_of == [34, 34]


def test_installs_once_and_is_undone() -> None:
    stock = toy_host.Loader.load_step
    installed = template.install(max_tokens=CAP)
    try:
        assert template.install(max_tokens=CAP) is installed
        with pytest.raises(BalanceError, match="toy_host is hooked already"):
            template.install(max_tokens=2 * CAP)
        assert toy_host.Loader.load_step is not stock
    finally:
        installed.undo()
    assert toy_host.Loader.load_step is stock


def test_another_version_is_refused_unless_any_is_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "2.0.0")
    with pytest.raises(BalanceError, match=r"toy_host is 2\.0\.0.*tested on 1\.2.*set MEGATRON_BALANCE_ANY_VERSION=1"):
        template.install(max_tokens=CAP)
    assert not template.installation.is_installed()
    monkeypatch.setenv("MEGATRON_BALANCE_ANY_VERSION", "1")
    template.install(max_tokens=CAP).undo()


def test_the_switch_leaves_the_host_as_it_is(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr("megatron_balance.hooking._announced_off", set())
    monkeypatch.setenv("MEGATRON_BALANCE", "0")
    stock = toy_host.Loader.load_step
    for _ in range(2):
        template.install(max_tokens=CAP)
    assert toy_host.Loader.load_step is stock
    assert not template.installation.is_installed()
    [line] = caplog.messages
    assert line == "MEGATRON_BALANCE=0: toy_host runs without balancing, and ignores its flags."
