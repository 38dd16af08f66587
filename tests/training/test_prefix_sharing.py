"""Prefixes that are computed once change no loss and no gradient: `--balance-share-prefixes`, against stock runs.

The rows are trees of three levels, samples that begin others, and equal ones (`kept_runs.write_rollouts`), hashed in
small blocks, so that all that they share is found.
"""

import re

import pytest
from table import ROUTER_LOSSES, SHARED, SHARED_ROWS, SMALL_BLOCKS, sharing
from test_matrix import assert_reads, case, microbatches
from training_run import ALLOWANCES, RunFailed, assert_equal

from megatron_balance.record import read_record


@pytest.mark.parametrize("row", [case(row) for row in SHARED_ROWS])
def test_equals_stock(train, row):
    stock = train(row.stock, num_ranks=row.num_ranks, stand_ins=row.stand_ins, leave_out=row.without)
    stand_ins = (*row.stand_ins, *row.ours)
    ours = train(f"{row.stock} {row.balance}", num_ranks=row.num_ranks, stand_ins=stand_ins, leave_out=row.without)
    assert_equal(ours, reference=stock, precision=row.precision)
    limit = max(ALLOWANCES[row.precision].loss, 1e-6)
    assert ours.losses() == [pytest.approx(losses, rel=limit) for losses in stock.losses()]
    if "--balance-verify" not in row.balance:  # which runs the micro-batches of stock too
        assert_reads(ours, stock=stock, chunks=row.num_chunks)
        assert_shared(ours)


def assert_shared(ours):
    """Micro-batches hold far fewer tokens than are given, and the log says how many."""
    first = [rows for rows in ours.of_kind("step") if not rows[0]["stage"] and not rows[0]["tp_rank"]]
    given = [row["tokens"] for row in ours.of_kind("counted")[0]]
    computed = [
        sum(m["tokens"] for row in of_ranks for m in row["microbatches"]) for of_ranks in zip(*first, strict=True)
    ]
    logged = [float(text) / 100 for text in re.findall(r"computed ([\d.]+)% of the tokens given", ours.log(0))]
    padding = [float(text) / 100 for text in re.findall(r"padding ([\d.]+)%", ours.log(0))]
    assert len(logged) == len(given)
    for of_step, total, fraction, filler in zip(computed, given, logged, padding, strict=True):
        without_filler = of_step * (1 - filler)
        assert without_filler < 0.8 * total
        assert without_filler == pytest.approx(fraction * total, rel=2e-3)


def test_a_record_holds_what_is_shared(train):
    verified = SHARED_ROWS[0]
    ours = train(f"{verified.stock} {verified.balance}", num_ranks=2, stand_ins=verified.ours)
    steps = read_record(ours.folder / "record").steps
    given = [row["tokens"] for row in ours.of_kind("counted")[0]]
    assert [int(step.lengths.sum()) for step in steps] == given
    assert all(step.metrics().computed_tokens < 0.8 * step.lengths.sum() for step in steps)


def test_router_losses_count_a_token_as_often_as_samples_hold_it(train):
    """Of one rank whose micro-batch holds the whole step, so that the losses of routers are of the same samples."""
    cap = SHARED.replace("--max-tokens-per-gpu 256", "--max-tokens-per-gpu 8192")
    of_one = sharing("router-losses", "TP2-SP", ROUTER_LOSSES, model="moe")
    unshared, shared = (
        train(f"{of_one.stock} {flags}", num_ranks=2, stand_ins=of_one.ours)
        for flags in (cap.replace("--balance-share-prefixes", ""), cap)
    )
    assert_equal(shared, reference=unshared)
    for name, number in unshared.of_kind("logged")[-1][-1]["numbers"].items():
        if "loss" in name and "validation" not in name:
            # The log averages means of sequence-parallel ranks, which hold other parts of the samples.
            allowed = 1e-3 if name == "z_loss" else 2e-6
            assert shared.of_kind("logged")[-1][-1]["numbers"][name] == pytest.approx(number, rel=allowed), name


@pytest.mark.slow
def test_a_resumed_run_shares_what_it_did(train):
    dense = sharing("dense", "DP2")
    flags = f"{dense.stock} {SHARED} --ckpt-format torch"
    whole = train(f"{flags} --save {{run}}/checkpoints --save-interval 2", stand_ins=dense.ours)
    resumed = train(f"{flags} --load {whole.folder}/checkpoints --ckpt-step 2", stand_ins=dense.ours)
    assert microbatches(resumed) == [steps[2:] for steps in microbatches(whole)]
    for key in ("lm_loss", "grad_norm"):
        assert [step[key] for step in resumed.steps] == [step[key] for step in whole.steps[2:]]


def test_a_layer_that_ignores_the_tree_ends_the_run(train):
    dense = sharing("dense", "DP2")
    with pytest.raises(RunFailed, match="1 of 2 layers attended over shared prefixes"):
        train(f"{dense.stock} {SHARED}", stand_ins=(SMALL_BLOCKS, ("stand_ins:stubborn_layer", {})))


@pytest.mark.parametrize(
    ("stand_in", "text"),
    [("equal_hashes", "by their hashes two samples begin alike"), ("fail_to_hash", "no room for hashes")],
)
def test_what_fails_on_one_rank_ends_the_run_on_all(train, stand_in, text):
    dense = sharing("dense", "DP2")
    failed = train(f"{dense.stock} {SHARED}", stand_ins=(SMALL_BLOCKS, (f"stand_ins:{stand_in}", {})), fails=True)
    for rows in failed.of_kind("error"):
        assert text in rows[-1]["text"]
