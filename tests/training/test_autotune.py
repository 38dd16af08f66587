"""Settings that a run finds by itself: costs by its own seconds, taken by all ranks at one step, and kept."""

import re

import numpy as np
import pytest
from table import BY_TOKENS, MODELS, RECORDED, ROWS
from test_matrix import microbatches

from megatron_balance.record import read_record

NUM_STEPS, TUNED = 7, 4
SECONDS = {"launch": 2e-3, "token": 1e-5, "squared": 1e-6}
"""Of a narrow model on long samples: attention takes longer than all else from ten tokens on."""


def made_up(**changes):
    return (("stand_ins:made_up_seconds", SECONDS | changes),)


def tuned(train, balance=f"auto:{TUNED}", *, stock=ROWS[0].stock, **keywords):
    """A run of NUM_STEPS steps, in place of the three of the table."""
    keywords = {"stand_ins": made_up(), **keywords}
    flags = f"{stock} --train-iters {NUM_STEPS} --eval-iters 0 {BY_TOKENS} --balance-cost {balance}"
    return train(flags, **keywords)


def lines_of(run):
    return re.findall(r"megatron_balance: (.*auto.*)", run.log(0))


SAVED = f"auto:{TUNED} {RECORDED} --save {{run}}/checkpoints --save-interval 1 --ckpt-format"


@pytest.fixture(scope="module")
def whole(train):
    """A run that saves a checkpoint after every step."""
    return tuned(train, f"{SAVED} torch")


def test_plans_follow_the_seconds_after_some_steps(train, whole):
    by_flops = tuned(train, "flops")
    for ours, theirs in zip(microbatches(whole), microbatches(by_flops), strict=True):
        assert ours[:TUNED] == theirs[:TUNED]
        assert ours[TUNED:] != theirs[TUNED:]
    info = read_record(whole.folder / "record").info
    assert info.cost_name == "seconds"
    assert info.cost_model.per_microbatch == pytest.approx(SECONDS["launch"] * 1e18, rel=0.01)
    assert info.cost_model.quadratic == pytest.approx(SECONDS["squared"] * 1e18, rel=0.01)
    (line,) = lines_of(whole)
    assert "a micro-batch takes 0.002 s, a token 1e-05 s and a squared token 1e-06 s" in line
    assert re.search(r"off by 0\.\d% on steps that were left out of the fit, the costs in use by [1-9]\d\.\d%", line)
    assert f"Plans follow from step {TUNED + 1} on" in line


@pytest.mark.parametrize("step", [TUNED, NUM_STEPS - 1])
def test_a_run_that_has_found_its_costs_goes_on_with_the_same_plans(train, whole, step):
    """Microbatches are compared one by one."""
    resumed = tuned(train, f"auto:{TUNED} --load {whole.folder}/checkpoints --ckpt-step {step} --ckpt-format torch")
    assert microbatches(resumed) == [steps[step:] for steps in microbatches(whole)]
    for key in ("lm_loss", "grad_norm"):
        assert [row[key] for row in resumed.steps] == [row[key] for row in whole.steps[step:]]
    (line,) = lines_of(resumed)
    assert "the costs that the run had found" in line


def test_a_run_that_ends_before_searches_anew(train, whole):
    again = tuned(train, f"auto:{TUNED} --load {whole.folder}/checkpoints --ckpt-step 2 --ckpt-format torch")
    (line,) = lines_of(again)
    assert f"steps 3 to {TUNED + 2}:" in line


def test_costs_are_found_again_where_that_is_asked_for(train, whole):
    again = tuned(train, f"auto:3 --load {whole.folder}/checkpoints --ckpt-step {TUNED} --ckpt-format torch")
    kept, found = lines_of(again)
    assert "the costs that the run had found" in kept
    assert f"steps {TUNED + 1} to {TUNED + 3}:" in found


@pytest.mark.parametrize(
    ("flags", "num_ranks"),
    [
        pytest.param("--pipeline-model-parallel-size 2 --tensor-model-parallel-size 2 --sequence-parallel", 4, id="PP"),
        pytest.param("--context-parallel-size 2", 4, id="CP2", marks=pytest.mark.slow),
        pytest.param("--balance-dynamic-cp", 4, id="dynamic-cp", marks=pytest.mark.slow),
    ],
)
def test_all_ranks_of_a_replica_take_costs_and_cap(train, flags, num_ranks):
    flags, keywords = f"{flags} --max-tokens-per-gpu auto", {"num_ranks": num_ranks, "stand_ins": device()}
    whole = tuned(train, f"{SAVED} torch_dist {flags}", **keywords)
    line, of_cap = lines_of(whole)
    assert re.search(r"tokens-per-gpu auto, steps 1 to 4: (\d+) from now on", of_cap)
    assert f"steps 1 to {TUNED}:" in line
    load = f"auto:{TUNED} {flags} --load {whole.folder}/checkpoints --ckpt-format torch_dist --ckpt-step"
    resumed = tuned(train, f"{load} {TUNED}", **keywords)
    assert microbatches(resumed) == [steps[TUNED:] for steps in microbatches(whole)]


@pytest.mark.parametrize("waits", [False, True])
def test_seconds_of_experts_contain_waiting_for_peers(train, waits):
    """In each micro-batch all ranks take as long as the slowest: the others' seconds say nothing."""
    stock = f"{ROWS[0].stock} {MODELS['moe']} --expert-model-parallel-size 2"
    run = tuned(train, f"auto:{NUM_STEPS} {RECORDED}", stock=stock, stand_ins=made_up(waits=waits))
    costs = read_record(run.folder / "record").info.cost_model
    assert costs.quadratic == pytest.approx(SECONDS["squared"] * 1e18, rel=0.03)
    assert costs.per_microbatch == pytest.approx(SECONDS["launch"] * 1e18, rel=0.15)


def test_costs_stay_where_fitted_ones_predict_worse(train):
    costs = read_record(tuned(train, f"flops {RECORDED}").folder / "record").info.cost_model
    true = {"launch": costs.per_microbatch, "token": costs.linear, "squared": costs.quadratic}
    seconds = {name: cost * 1e-9 for name, cost in true.items()}
    run = tuned(train, stand_ins=made_up(**seconds, noise=0.2))
    (line,) = lines_of(run)
    assert re.search(r"costs stay as they are: fitted ones are off by \d+\.\d% on steps that were left out", line)
    assert microbatches(run) == microbatches(tuned(train, "flops"))


def test_costs_stay_where_too_few_steps_were_measured(train):
    run = tuned(train, "auto:2")
    (line,) = lines_of(run)
    assert "costs stay as they are: the record has" in line
    assert microbatches(run) == microbatches(tuned(train, "flops"))


def test_slow_ranks_get_less_work(train):
    """Rank 1 takes a fifth longer for it; a resumed run weighs by it from its first step."""
    flags = f"flops {RECORDED} --balance-rank-speeds --train-iters 13 --save {{run}}/checkpoints --save-interval 11"
    run = tuned(train, f"{flags} --ckpt-format torch", stand_ins=made_up(launch=0.0, squared=0.0, slowness=[1.0, 1.2]))
    ratios = [np.divide(*step.costs.sum(axis=1)) for step in read_record(run.folder / "record").steps]
    assert np.median(ratios[:10]) == pytest.approx(1, abs=0.02)
    assert np.median(ratios[10:]) == pytest.approx(1.2, abs=0.05)
    load = f"flops --balance-rank-speeds --train-iters 13 --load {run.folder}/checkpoints --ckpt-format torch"
    assert microbatches(tuned(train, f"{load} --ckpt-step 11")) == [steps[11:] for steps in microbatches(run)]


MIB = 2**20
BEST = 1000
"""Tokens that leave a tenth of the device below free."""


def device(**changes):
    """300 of 1445 MiB stay between steps, and a token takes one."""
    memory = {"total": 1445 * MIB, "static": 300 * MIB, "each_token": MIB}
    return (*made_up(), ("stand_ins:counting_allocator", memory | changes))


def longest_of(run):
    return max(microbatch["tokens"] for steps in microbatches(run) for step in steps for microbatch in step)


@pytest.mark.parametrize("noise", [0.0, 0.05])
def test_the_cap_grows_to_what_devices_hold(train, noise):
    """The device is never fuller than nine tenths, and in the end as few micro-batches run as by the best cap."""
    stands = device(noise=noise)
    run = tuned(train, f"flops {RECORDED} --max-tokens-per-gpu auto --train-iters 13", stand_ins=stands)
    by_hand = tuned(train, f"flops --max-tokens-per-gpu {BEST} --train-iters 13", stand_ins=stands)
    assert longest_of(run) * (1 + noise) <= BEST
    (line,) = lines_of(run)
    (cap, largest) = map(int, re.findall(r"steps 1 to 10: (\d+) from now on, where (\d+) would leave", line)[0])
    assert cap <= largest
    assert 0.88 * BEST < largest < BEST
    assert read_record(run.folder / "record").info.limits.max_tokens_per_gpu == cap
    counts = ([len(step) for step in microbatches(ours)[0]] for ours in (run, by_hand))
    for ours, theirs in zip(*map(list, counts), strict=True):
        assert ours >= theirs


@pytest.fixture(scope="module")
def grown(train):
    """A run that finds both, and saves a checkpoint after every step."""
    return tuned(train, f"{SAVED} torch --max-tokens-per-gpu auto", stand_ins=device())


@pytest.mark.parametrize("step", [TUNED, NUM_STEPS - 1])
def test_a_run_that_has_found_its_cap_goes_on_with_it(train, grown, step):
    load = f"--load {grown.folder}/checkpoints --ckpt-step {step} --ckpt-format torch"
    resumed = tuned(train, f"auto:{TUNED} --max-tokens-per-gpu auto {load}", stand_ins=device())
    assert microbatches(resumed) == [steps[step:] for steps in microbatches(grown)]


def test_a_run_without_memory_says_the_cap_to_begin_with(train, grown):
    """After the cap was found; the next start begins with four fifths of it, and raises it no further."""
    cap = read_record(grown.folder / "record").info.limits.max_tokens_per_gpu or 0
    assert cap > 256
    auto = f"auto:{TUNED} --max-tokens-per-gpu auto"
    load = f"--load {grown.folder}/checkpoints --ckpt-step 5 --ckpt-format torch"
    full = tuned(train, f"{auto} {RECORDED} {load}", stand_ins=device(full_at=1), fails=True)
    for (error,) in full.of_kind("error"):
        assert (
            f"Device memory ran out at --max-tokens-per-gpu {cap}, which auto had found: set {cap * 4 // 5}"
            in error["text"]
        )
    again = tuned(train, f"{auto} --balance-record {full.folder}/record {load}", stand_ins=device())
    assert longest_of(again) <= cap * 4 // 5
