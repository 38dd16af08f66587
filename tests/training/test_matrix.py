"""Balancing changes no loss and no gradient: every row of `table.py`, against a stock run of its layout."""

from __future__ import annotations

import pytest
from kept_runs import KeptRuns, Run
from steps import assert_trains_as_stock
from table import ROWS, Row
from training_run import assert_equal


def case(row: Row) -> object:
    marks = [pytest.mark.xdist_group(row.layout)]
    if row.slow:
        marks.append(pytest.mark.slow)
    return pytest.param(row, id=f"{row.layout}-{row.name}", marks=marks)


def run_of(train: KeptRuns, row: Row, *, balanced: bool = True) -> Run:
    """The balanced or the stock run of a row."""
    flags, stand_ins = row.stock, row.stand_ins
    if balanced:
        flags, stand_ins = f"{flags} {row.balance}", (*stand_ins, *row.ours)
    return train(flags, num_ranks=row.num_ranks, stand_ins=stand_ins, leave_out=row.without)


@pytest.mark.parametrize("row", [case(row) for row in ROWS])
def test_equals_stock(train: KeptRuns, row: Row) -> None:
    stock, ours = run_of(train, row, balanced=False), run_of(train, row)
    assert_trains_as_stock(ours, stock=stock, row=row)


def test_an_error_of_a_hundred_thousandth_is_found(train: KeptRuns) -> None:
    row = ROWS[0]
    wrong = (("stand_ins:loss_error", {"relative": 1e-5}),)
    ours = train(f"{row.stock} {row.balance}", stand_ins=wrong)
    with pytest.raises(AssertionError, match=r"differs by .*e-05"):
        assert_equal(ours.recorded, reference=run_of(train, row, balanced=False).recorded)
