"""Accelerate, Trainer, TRL and StatefulDataLoader themselves, on two CPU ranks: losses, micro-batches and resuming."""

from __future__ import annotations

from typing import Any

import pytest
from gloo_ranks import run_ranks
from hf_cases import LENGTHS, alone

KINDS = ("padded", "flattened", "trl packed", "trl padded")


def train(kind: str, *, stop: int = 0, options: dict[str, Any] | None = None, **settings: Any) -> list[Any]:
    return run_ranks(2, "hf_cases:train", kind=kind, stop=stop, options=options or {}, settings=settings)


@pytest.mark.parametrize("kind", KINDS)
def test_losses_and_gradients_are_those_of_the_samples_alone(kind):
    ranks = train(kind, options={"max_tokens": 1200})
    logs, steps = ranks[0]["logs"], ranks[0]["steps"]
    assert len(logs) == len(steps) == 8
    for logged, step in zip(logs, steps, strict=True):
        assert logged == pytest.approx(alone(step), rel=5e-7)
    for rank in ranks:
        assert rank["batches"] == [*rank["lines"][0], *rank["lines"][1]]
    widths = [max(batch) * len(batch) if "pad" in kind else sum(batch) for rank in ranks for batch in rank["batches"]]
    assert max(widths) <= 1200


@pytest.mark.parametrize("stop", [3, 6])
@pytest.mark.parametrize("kind", ["padded", "trl packed"])
def test_resuming_gives_the_micro_batches_of_an_uninterrupted_run(kind, stop):
    for rank in train(kind, stop=stop):
        whole = [*rank["lines"][0], *rank["lines"][1]]
        assert rank["batches"][-len(whole[2 * stop :]) :] == whole[2 * stop :]


def test_accelerate_deals_out_what_was_planned():
    for rank in run_ranks(2, "hf_cases:accelerate"):
        assert rank["given"] == rank["planned"]
        assert rank["given"][0] != rank["given"][1]


@pytest.mark.parametrize("num_workers", [0, 4])
@pytest.mark.parametrize("epoch", [0, 1])
def test_a_stateful_loader_goes_on_in_the_middle_of_a_step(num_workers, epoch):
    [case] = run_ranks(1, "hf_cases:stateful", num_workers=num_workers, given_before=3, epoch=epoch)
    assert len(case["rest"]) == 5
    assert case["resumed"] == case["rest"]


@pytest.mark.parametrize(
    ("options", "settings", "message"),
    [
        ({}, {"average_tokens_across_devices": False}, "average_tokens_across_devices=False does not go"),
        ({}, {"accelerator_config": {"split_batches": True}}, "split_batches=True does not go"),
        ({"lengths": LENGTHS[:9].tolist()}, {}, "lengths has 9 entries, and the data set 64 rows"),
        ({"max_tokens": 100}, {}, "max_tokens is 100"),
    ],
)
def test_settings_under_which_losses_depend_on_micro_batches_are_refused(options, settings, message):
    with pytest.raises(pytest.fail.Exception, match=message):
        train("flattened", options=options, **settings)
