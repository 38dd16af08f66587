"""Balancing changes no loss and no gradient: every row of `table.py`, against a stock run of its layout.

The rest of what must hold for every balanced run is seen from outside too: see tests/kit/watched_steps.py.
"""

import re
from collections import Counter
from fractions import Fraction
from pathlib import Path

import pytest
from table import FAMILY_ROWS, NUM_STEPS, ROWS
from training_run import ALLOWANCES, assert_equal


def case(row):
    return pytest.param(row, id=f"{row.layout}-{row.name}", marks=[pytest.mark.slow] if row.slow else [])


def run_of(train, row, *, balanced=True):
    """The balanced or the stock run of a row."""
    flags, stand_ins = row.stock, row.stand_ins
    if balanced:
        flags, stand_ins = f"{flags} {row.balance}", (*stand_ins, *row.ours)
    return train(flags, num_ranks=row.num_ranks, stand_ins=stand_ins, leave_out=row.without)


@pytest.mark.parametrize("row", [case(row) for row in ROWS])
def test_equals_stock(train, row):
    stock, ours = run_of(train, row, balanced=False), run_of(train, row)
    assert_trains_as_stock(ours, stock=stock, row=row)


@pytest.mark.parametrize("row", [case(ROWS[0])])
def test_an_error_of_a_hundred_thousandth_is_found(train, row):
    wrong = (("stand_ins:loss_error", {"relative": 1e-5}),)
    ours = train(f"{row.stock} {row.balance}", stand_ins=wrong)
    with pytest.raises(AssertionError, match=r"differs by .*e-05"):
        assert_equal(ours, reference=run_of(train, row, balanced=False))


def test_the_page_names_what_is_trained():
    page = (Path(__file__).parents[2] / "docs" / "models.md").read_text(encoding="utf-8")
    lines = page.split("## What is trained")[1].split("\n## ")[0].splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| ")][1:]
    for column, dynamic in ((1, False), (2, True)):
        trained = {row.model: [] for row in FAMILY_ROWS}
        for row in FAMILY_ROWS:
            if row.dynamic is dynamic and row.layout not in trained[row.model]:
                trained[row.model].append(row.layout)
        assert {row[0]: ([] if "refused" in row[column] else row[column].split(", ")) for row in rows} == trained


def assert_trains_as_stock(ours, *, stock, row):
    """The same losses, gradients, samples and evaluations; caps hold; Megatron's settings are restored."""
    assert_equal(ours, reference=stock, precision=row.precision)
    assert len(ours.steps) == NUM_STEPS
    for kind in ("step", "evaluation"):
        assert samples(ours, kind) == samples(stock, kind), f"other samples in a {kind}"
    for rows in ours.of_kind("step"):
        assert len({str(settings) for row in rows for settings in row["settings"]}) == 1, "settings are not restored"
    assert_under_cap(ours, cap=row.cap)
    assert all(m["tokens"] % row.multiple == 0 for steps in microbatches(ours) for step in steps for m in step)
    assert_evaluates_as_stock(ours, stock=stock, row=row)
    assert_logs_as_stock(ours, stock=stock, row=row)
    assert_counted(ours)
    assert row.dynamic == (len(cp_sizes(ours)) > 1)
    assert_reads(ours, stock=stock, chunks=row.num_chunks)


def samples(run, kind):
    """Of every step or evaluation how often each sample ran, over all ranks that share a micro-batch once."""
    found = []
    for of_ranks in zip(*run.of_kind(kind), strict=True):
        counts = {}
        for row in of_ranks:
            if row["stage"] or row["tp_rank"]:
                continue
            for microbatch in row["microbatches"]:
                for sample in microbatch["samples"]:
                    counts[sample] = counts.get(sample, Fraction()) + Fraction(1, microbatch["cp_size"])
        found.append(Counter({sample: int(count) for sample, count in counts.items()}))
        assert all(count.denominator == 1 for count in counts.values()), "not on all ranks of its group"
    assert found
    return found


def microbatches(run, kind="step"):
    """Of each rank that reads, of each step, those with tokens."""
    return [
        [[microbatch for microbatch in row["microbatches"] if "tokens" in microbatch] for row in rows]
        for rows in run.of_kind(kind)
        if rows and not rows[0]["tp_rank"]
    ]


def cp_sizes(run):
    """Context-parallel sizes that ran."""
    return {m["cp_size"] for steps in microbatches(run) for step in steps for m in step}


def assert_under_cap(run, *, cap):
    """No micro-batch of several samples is over the cap."""
    for steps in microbatches(run):
        for microbatch in (m for step in steps for m in step if cap is not None and len(m["samples"]) > 1):
            assert microbatch["tokens"] <= cap * microbatch["cp_size"]


def assert_evaluates_as_stock(ours, *, stock, row):
    """Equal losses, in fewer micro-batches where evaluation is balanced and samples are packed, else in as many."""
    limit = max(ALLOWANCES[row.precision].loss, 1e-6)
    assert ours.losses() == [pytest.approx(losses, rel=limit) for losses in stock.losses()]
    for mine, theirs in zip(ours.of_kind("evaluation"), stock.of_kind("evaluation"), strict=True):
        assert [event["consumed"] for event in mine] == [event["consumed"] for event in theirs]
        for one, other in zip(mine, theirs, strict=True):
            fewer = len(one["microbatches"]) < len(other["microbatches"])
            assert fewer == (row.evaluates and bool(other["microbatches"]))


FIGURES = {
    *("planned_imbalance", "over_bound", "unavoidable_waiting", "num_microbatches", "padding_fraction"),
    *("plan_seconds", "exchange_seconds", "exposed_seconds", "oversized_samples", "fallback_plans"),
}
MEANS = re.compile(r"(moe/)?(load_balancing|z)_loss|mtp_\d+ loss")
"""Numbers that are means over micro-batches, which depend on the samples that share one: by one part in ten here."""


def assert_logs_as_stock(ours, *, stock, row):
    """The numbers of Megatron's log; means over micro-batches where these are the stock run's: of one sample each."""
    alone = all(len(m["samples"]) <= 1 for steps in microbatches(ours) for step in steps for m in step)
    limit = ALLOWANCES[row.precision]
    for mine, theirs in zip(ours.of_kind("logged")[-1], stock.of_kind("logged")[-1], strict=True):
        figures = {name.removeprefix("balance/") for name in mine["numbers"] if name.startswith("balance/")}
        assert figures >= FIGURES, "figures of balancing"
        assert {name for name in mine["numbers"] if not name.startswith("balance/")} == set(theirs["numbers"])
        for name, number in theirs["numbers"].items():
            # With context parallelism stock averages means of ranks, and a rank without real tokens has 0 of these.
            if "validation" in name or (name.startswith("mtp") and "CP2" in row.layout):
                continue
            allowed = limit.grad_norm if name.startswith("grad-norm") else max(limit.loss, 1e-6)
            allowed = 0.1 if MEANS.match(name) and not alone else allowed
            assert mine["numbers"][name] == pytest.approx(number, rel=allowed), name


def assert_counted(run):
    """Megatron counts the tokens of each step's samples, and the squares of their lengths, once each."""
    first = [rows for rows in run.of_kind("step") if not rows[0]["stage"] and not rows[0]["tp_rank"]]
    for step, counted in enumerate(run.of_kind("counted")[0]):
        tokens, squares = Fraction(), Fraction()
        for m in (m for rows in first for m in rows[step]["microbatches"]):
            tokens += Fraction(sum(m["lengths"]), m["cp_size"])
            squares += Fraction(sum(length**2 for length in m["lengths"]), m["cp_size"])
        assert (counted["tokens"], counted["squares"]) == (tokens, squares)


def assert_reads(ours, *, stock, chunks):
    """As many items are read as by the stock run, none after the last; stages in between may read none."""
    last = max(rows[0]["stage"] for rows in ours.of_kind("step"))
    for mine, theirs, place in zip(ours.of_kind("end"), stock.of_kind("end"), ours.of_kind("step"), strict=True):
        expected = {split: number // chunks for split, number in theirs[0]["reads"].items()}
        in_between = place[0]["stage"] not in (0, last)
        assert mine[0]["reads"] == expected or (in_between and not mine[0]["reads"])
