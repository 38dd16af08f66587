"""One rank's micro-batches, and what a rank that loads nothing has in place of a data loader."""

from __future__ import annotations

from itertools import islice

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from megatron_balance.adapters.areal import endless
from megatron_balance.adapters.areal.plan import plan_microbatches
from megatron_balance.adapters.areal.single_rank import IdleDataLoader
from megatron_balance.cost.model import CostModel
from megatron_balance.errors import BalanceError

COST = CostModel(linear=100, quadratic=1)


@settings(max_examples=150, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 64), min_size=1, max_size=40),
    max_tokens=st.sampled_from([64, 100, 256, 10**12]),
    least=st.integers(1, 6),
    divisor=st.integers(1, 3),
)
def test_rows_are_packed_once_under_the_cap(lengths: list[int], max_tokens: int, least: int, divisor: int) -> None:
    wanted = -(-max(least, -(-sum(lengths) // max_tokens)) // divisor) * divisor
    try:
        slots = plan_microbatches(
            lengths, max_tokens=max_tokens, min_microbatches=least, divisor=divisor, cost_model=COST
        )
    except BalanceError:
        # Rows fit wherever there is one for each of twice the micro-batches that their tokens need.
        event("too few rows")
        assert len(lengths) < 2 * wanted + divisor
        return
    assert sorted(row for slot in slots for row in slot) == list(range(len(lengths)))
    assert all(slots)
    assert len(slots) >= wanted
    assert len(slots) % divisor == 0
    assert max(sum(lengths[row] for row in slot) for slot in slots) <= max_tokens
    costs = [sum(COST(lengths[row]) for row in slot) for slot in slots]
    assert costs == sorted(costs, reverse=True)


def test_as_many_micro_batches_as_asked_and_no_more() -> None:
    """AReaL's mini-batches are made so: n_mbs of them, no cap."""
    slots = plan_microbatches([5, 9, 3, 7] * 8, max_tokens=10**12, min_microbatches=4, cost_model=COST)
    assert len(slots) == 4
    tokens = [sum([5, 9, 3, 7][row % 4] for row in slot) for slot in slots]
    assert max(tokens) <= 1.1 * min(tokens)


def test_a_divisor_that_rows_cannot_fill_is_refused() -> None:
    """`kk_allocate([5] * 5, 5, 1, 4)` gives 5 groups, no multiple of 4; 8 are needed and there are 5 rows."""
    with pytest.raises(BalanceError, match=r"5 rows for 8 micro-batches \(n_mbs_divisor is 4\)"):
        plan_microbatches([5] * 5, max_tokens=5, min_microbatches=1, divisor=4, cost_model=COST)


def test_a_row_over_the_cap_is_refused() -> None:
    with pytest.raises(BalanceError, match="600 tokens and max_tokens_per_mb is 512"):
        plan_microbatches([5, 600, 7], max_tokens=512, cost_model=COST)


def test_batches_go_on_when_an_epoch_ends() -> None:
    """R45: a batch is fetched whether or not the loader had to be started again."""
    assert list(islice(endless(["a", "b"]), 5)) == ["a", "b", "a", "b", "a"]
    with pytest.raises(BalanceError, match="no batches"):
        next(endless([]))


def test_a_rank_that_loads_nothing_has_steps_and_no_batches() -> None:
    """R56."""
    loader = IdleDataLoader(num_batches=7, batch_size=32)
    assert (len(loader), loader.batch_size) == (7, 32)
    loader.load_state_dict(loader.state_dict())
    with pytest.raises(BalanceError, match="loads nothing"):
        iter(loader)
