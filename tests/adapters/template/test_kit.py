"""The adapter kit: steps of a rollout batch, even parts, micro-batches packed alike on every rank, rows that move."""

from itertools import chain

import numpy as np
import pytest
import torch
import torch.distributed as dist
from gloo_ranks import preload, run_ranks
from hypothesis import example, given
from hypothesis import strategies as st

from megatron_balance import BalanceError, CostModel
from megatron_balance.adapters.kit import agreed_microbatches, even_parts, launch, split_rollout
from megatron_balance.adapters.kit.rows import exchange_rows

COST = CostModel(linear=24576, quadratic=1)


@given(st.lists(st.integers(0, 7), max_size=30), st.integers(1, 4))
def test_steps_hold_whole_groups_and_every_sample_once(groups, global_batch_size):
    split = split_rollout(groups, global_batch_size=global_batch_size)
    assert sorted(chain.from_iterable(step.tolist() for step in split.steps)) == list(range(len(groups)))
    of_steps = [{groups[sample] for sample in step} for step in split.steps]
    assert [len(ids) for ids in of_steps] == list(split.num_groups)
    # Groups come in the order of their first samples, a step's worth at a time.
    in_order = list(dict.fromkeys(groups))
    assert [*chain.from_iterable(sorted(ids, key=in_order.index) for ids in of_steps)] == in_order
    assert set(split.num_groups[:-1]) <= {global_batch_size}


@pytest.mark.parametrize("size", [0, -1, True, 2.0])
def test_a_global_batch_size_that_cannot_be_is_named(size):
    with pytest.raises(BalanceError, match="global_batch_size is"):
        split_rollout([1, 2], global_batch_size=size)


@given(st.lists(st.integers(0, 2**62), min_size=1, max_size=30), st.integers(1, 6))
@example([59, 37, 37, 33, 30, 30, 21, 18, 13], 3)
def test_every_item_in_one_part_and_none_empty(costs, num_parts):
    num_parts, worst = min(num_parts, len(costs)), {}
    for equal_count in (True, False):
        parts = even_parts(costs, num_parts=num_parts, equal_count=equal_count)
        assert sorted(chain.from_iterable(part.tolist() for part in parts)) == list(range(len(costs)))
        assert all(part.size for part in parts)
        assert not equal_count or max(part.size for part in parts) == -(-len(costs) // num_parts)
        worst[equal_count] = max(sum(costs[item] for item in part) for part in parts)
    # Larger sums lose their last bits.
    assert worst[False] <= worst[True] or sum(costs) >= 2**60


def test_no_more_micro_batches_than_the_tokens_ask_for():
    """25 rows of 50 to 89 tokens fill 6 micro-batches of 300 to nine tenths."""
    fewest = 0
    for seed in range(100):
        lengths = np.random.default_rng(seed).integers(50, 90, 25)
        fewest += len(agreed_microbatches(lengths, max_tokens=300, cost_model=COST)) == -(-int(lengths.sum()) // 300)
    assert fewest >= 99


@given(
    st.lists(st.integers(1, 60), min_size=2, max_size=40).filter(lambda lengths: len(lengths) % 2 == 0),
    st.integers(120, 300),
    st.integers(1, 3),
    st.integers(1, 5),
    st.booleans(),
)
def test_pairs_are_packed_once_under_the_cap(lengths, max_tokens, multiple, least, mountain):
    options = {"least": least, "multiple": multiple, "rows_per_unit": 2, "mountain": mountain}
    needed = -(-max(least, -(-sum(lengths) // max_tokens)) // multiple) * multiple
    if len(lengths) // 2 < needed:
        with pytest.raises(BalanceError, match="micro-batches under max_tokens_per_gpu"):
            agreed_microbatches(lengths, max_tokens=max_tokens, cost_model=COST, **options)
        return
    try:
        slots = agreed_microbatches(lengths, max_tokens=max_tokens, cost_model=COST, **options)
    except BalanceError:
        assert len(lengths) // 2 < 2 * needed + multiple  # too few pairs to fill twice as many
        return
    assert sorted(chain.from_iterable(slots)) == list(range(len(lengths)))
    assert all(sum(lengths[row] for row in slot) <= max_tokens for slot in slots)
    assert all(slot[::2] == [row - 1 for row in slot[1::2]] for slot in slots)
    assert len(slots) % multiple == 0
    assert len(slots) >= needed


HOME_RANKS, RANKS = np.array([0, 0, 0, 1, 1, 2]), np.array([2, 0, 1, 2, 2, 0])
NUM_ENTRIES = np.array([[3, 0, 2, 1, 4, 2], [1] * 6])


def exchange():
    """Rows of a ragged column of pairs and of a dense one of three flags: what this rank gets of them."""
    own = np.flatnonzero(dist.get_rank() == HOME_RANKS)
    pairs = torch.tensor([[7 * row] * 2 for row in own for _ in range(NUM_ENTRIES[0, row])], dtype=torch.int16)
    columns = [pairs.reshape(-1, 2), torch.tensor([[row % 2 > 0, row > 2, True] for row in own]).reshape(-1, 3)]
    arrived = [
        exchange_rows(columns, num_entries=NUM_ENTRIES, home_ranks=HOME_RANKS, ranks=ranks, group=dist.group.WORLD)
        for ranks in (RANKS, HOME_RANKS)
    ]
    assert all(torch.equal(kept, column) for kept, column in zip(arrived[1], columns, strict=True))
    return [(str(column.dtype), column.tolist()) for column in arrived[0]]


def test_rows_of_every_shape_arrive_once_in_order():
    preload([])
    for rank, (pairs, flags) in enumerate(run_ranks(3, "test_kit:exchange")):
        coming = np.flatnonzero(rank == RANKS).tolist()
        assert pairs == ("torch.int16", [[7 * row] * 2 for row in coming for _ in range(NUM_ENTRIES[0, row])])
        assert flags == ("torch.bool", [[row % 2 > 0, row > 2, True] for row in coming])


def test_a_script_that_is_not_there_and_a_host_that_cannot_be_hooked_end_with_a_line(tmp_path):
    def refuse() -> None:
        raise BalanceError("the host is not installed.")

    with pytest.raises(SystemExit, match=r"there is no script 'none\.py'\. usage: host SCRIPT"):
        launch(["none.py"], install=refuse, usage="host SCRIPT")
    script = tmp_path / "train.py"
    script.write_text("raise AssertionError")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", [])
        patch.setattr("sys.path", [""])
        with pytest.raises(SystemExit, match="megatron_balance: the host is not installed"):
            launch([str(script)], install=refuse, usage="")
