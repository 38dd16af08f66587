"""Accelerate, Trainer, TRL and StatefulDataLoader themselves, on two CPU ranks: losses, micro-batches and resuming."""

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from gloo_ranks import run_ranks
from hf_cases import LENGTHS, alone, write_model

KINDS = ("padded", "flattened", "trl packed", "trl padded")


def train(kind, *, stop=0, options=None, **settings):
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


@pytest.mark.parametrize("num_workers", [0, 4])
@pytest.mark.parametrize("stop", [3, 6])
@pytest.mark.parametrize("kind", ["padded", "trl packed"])
def test_resuming_gives_the_micro_batches_of_an_uninterrupted_run(kind, stop, num_workers):
    if num_workers:  # the collator runs in workers: what was trained is seen by its losses, each epoch's in its order
        whole, resumed = (train(kind, stop=last, dataloader_num_workers=4)[0]["logs"] for last in (0, stop))
        np.testing.assert_allclose(resumed[stop - 8 :], whole[stop:], rtol=1e-6)
        return
    for rank in train(kind, stop=stop):
        whole = [*rank["lines"][0], *rank["lines"][1]]
        assert rank["batches"][-len(whole[2 * stop :]) :] == whole[2 * stop :]


@pytest.mark.parametrize("num_workers", [0, 4])
def test_accelerate_deals_out_what_was_planned_and_skips_what_was_trained(num_workers):
    for rank in run_ranks(2, "hf_cases:accelerate", num_workers=num_workers):
        assert rank["given"] == rank["planned"]
        assert rank["given"][0] != rank["given"][1]
        assert rank["rests"] == [batches[3:] for batches in rank["planned"]]


@pytest.mark.parametrize("num_workers", [0, 4])
@pytest.mark.parametrize("epoch", [0, 1])
def test_a_stateful_loader_goes_on_in_the_middle_of_a_step(num_workers, epoch):
    [case] = run_ranks(1, "hf_cases:stateful", num_workers=num_workers, given_before=3, epoch=epoch)
    assert len(case["rest"]) == 5
    assert case["resumed"] == case["rest"]


@pytest.mark.parametrize(
    ("options", "settings", "message"),
    [
        ({}, {"average_tokens_across_devices": False}, "average_tokens_across_devices=False lets each rank"),
        ({}, {"accelerator_config": {"split_batches": True}}, "split_batches=True cuts micro-batches anew"),
        ({}, {"accelerator_config": {"dispatch_batches": True}}, "dispatch_batches=True deals rows out anew"),
        ({"lengths": LENGTHS[:9].tolist()}, {}, "lengths has 9 entries, and the data set 64 rows"),
        ({"max_tokens": 100}, {}, "max_tokens is 100"),
    ],
)
def test_settings_under_which_losses_depend_on_micro_batches_are_refused(options, settings, message):
    with pytest.raises(pytest.fail.Exception, match=message):
        train("flattened", options=options, **settings)


def test_a_model_that_averages_means_of_micro_batches_is_warned_of():
    [messages] = run_ranks(1, "hf_cases:warned")
    assert any("forward takes no **kwargs" in message for message in messages)


def test_the_script_of_the_page_trains_on_two_ranks(tmp_path):
    page = (Path(__file__).parents[3] / "docs" / "loaders.md").read_text()
    (script,) = re.findall(r"```python no-run\n(# sft\.py\n.*?)```", page, flags=re.DOTALL)
    assert script.count('SFTConfig("out", ') == 1
    (tmp_path / "sft.py").write_text(script.replace('SFTConfig("out", ', 'SFTConfig("out", use_cpu=True, bf16=False, '))
    write_model(tmp_path / "Qwen" / "Qwen3-0.6B")
    chats = [{"messages": [{"role": "user", "content": "<7> " * length}]} for length in LENGTHS.tolist()]
    (tmp_path / "conversations.jsonl").write_text("\n".join(map(json.dumps, chats)))
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "sft.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "train_loss" in done.stdout + done.stderr
