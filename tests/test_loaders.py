"""Samplers without Megatron: whose samples a step has, caps, errors at construction, states, and streams."""

import itertools
import pickle

import numpy as np
import pytest
from gloo_ranks import run_ranks
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from megatron_balance import BalanceError, CostModel, ModelShape
from megatron_balance.loaders import BalancedBatchSampler, BalancedStream, dataset_lengths

QWEN = CostModel.from_shape(ModelShape.preset("Qwen3-8B"))
CAP = 16384


def sampler(lengths, rank=0, **options):
    options = {"global_batch_size": 16, "num_microbatches": 2, "num_replicas": 4, **options}
    return BalancedBatchSampler(lengths, rank=rank, **options)


def lengths_of(count, longest=1000):
    return np.clip(np.random.default_rng(count).lognormal(5, 1, count), 1, longest).astype(np.int64)


@given(
    lengths=st.lists(st.integers(1, 60), min_size=30, max_size=60).filter(
        lambda drawn: len(drawn) % 10 not in (1, 2, 3)
    ),
    padded=st.booleans(),
    objective=st.sampled_from(["step", "microbatch"]),
    epoch=st.integers(0, 3),
    drop_last=st.booleans(),
)
def test_every_step_has_its_samples_once_under_the_caps(lengths, padded, objective, epoch, drop_last):
    options = {"global_batch_size": 10, "num_microbatches": 2, "num_replicas": 2, "max_samples": 7, "padded": padded}
    options |= {"max_tokens": 300, "objective": objective, "drop_last": drop_last}
    ranks = [BalancedBatchSampler(lengths, rank=rank, **options) for rank in range(2)]
    for each in ranks:
        each.set_epoch(epoch)
    batches = [list(each) for each in ranks]
    order = np.random.default_rng([0, epoch]).permutation(len(lengths))
    moved = 0
    for step in range(ranks[0].num_steps):
        slots = [batch for rank in batches for batch in rank[2 * step : 2 * step + 2]]
        moved += sorted(order[10 * step : 10 * step + 10].tolist()) != sorted(itertools.chain(*slots))
        for batch in slots:
            tokens = [lengths[position] for position in batch]
            assert 0 < len(batch) <= 7
            assert (len(batch) * max(tokens) if padded else sum(tokens)) <= 300
    assert not moved or padded or max(lengths) > 40  # most steps fit as they are drawn
    given_once = list(itertools.chain(*itertools.chain(*batches)))
    assert len({*given_once}) == len(given_once) == (len(lengths) if not drop_last else len(lengths) // 10 * 10)
    in_turn = itertools.chain(*zip(*batches, strict=True))
    ranks[1].set_epoch(epoch)
    assert list(ranks[1].all_ranks()) == list(in_turn)


def test_packs_are_planned_by_their_segments():
    """Packs of equal tokens differ in attention: by segments they are dealt out, by totals they look alike."""
    whole, parts = [4000], [1000] * 4
    packs = sampler(
        [parts, whole, whole, whole, whole, parts, parts],
        model=CostModel(linear=1, quadratic=1),
        global_batch_size=7,
        num_microbatches=1,
        num_replicas=2,
        shuffle=False,
    )
    assert packs.lengths.tolist() == [4000] * 7
    rank_of_long = [sum(position in (1, 2, 3, 4) for position in batch) for batch in packs.all_ranks()]
    assert rank_of_long == [2, 2]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_tokens": 900}, "max_tokens is 900, and 1 samples are longer, up to 1000 tokens at position 3"),
        ({"global_batch_size": 7}, "needs 8 for its micro-batches"),
        ({"global_batch_size": 65}, "global_batch_size is 65 of 64 samples"),
        ({"global_batch_size": 60, "drop_last": False}, "needs 8 for its micro-batches"),
        ({"num_microbatches": 1, "max_tokens": 1000}, r"step \d of epoch 0 needs 2 on each rank"),
        ({"max_samples": 0}, "max_samples is 0"),
        ({"num_microbatches": 0}, "num_microbatches is 0"),
        ({"num_microbatches": 1, "max_tokens": 1000, "shuffle": False}, "step 0 of epoch 0 needs 2 on each rank"),
        ({"num_microbatches": 1, "max_tokens": 1000, "padded": True}, r"step \d of epoch 0 needs [23] on each rank"),
        ({"num_replicas": 2}, "rank is 3 of num_replicas 2"),
        ({"objective": "never"}, "never"),
    ],
)
def test_wrong_arguments_end_at_construction(options, message):
    lengths = np.full(64, 300)
    lengths[3] = 1000
    with pytest.raises(BalanceError, match=message):
        sampler(lengths, rank=3, **options)


def test_a_free_number_of_micro_batches_comes_step_by_step():
    free = sampler(lengths_of(64), num_microbatches=None, max_tokens=1200)
    steps = list(free)
    assert len(steps) == len(free) == 4
    assert all(itertools.chain(*steps))
    next(iter(free))
    resumed = sampler(lengths_of(64), num_microbatches=None, max_tokens=1200)
    resumed.load_state_dict(free.state_dict())
    assert list(resumed) == steps[1:]


def test_a_step_that_does_not_fit_is_mixed_with_the_one_of_fewest_tokens():
    """Fault: an epoch of which no drawn order fitted ended the run when it began."""
    lengths = np.tile([60, *[5] * 31], 16)  # three of the 60 in a step are too many
    options = {"global_batch_size": 32, "num_microbatches": 1, "num_replicas": 2, "max_tokens": 140}
    order = np.random.default_rng([0, 7]).permutation(512).reshape(16, 32)
    assert ((lengths[order] == 60).sum(axis=1) > 2).any()
    each = sampler(lengths, **options)
    each.set_epoch(7)
    batches = list(each.all_ranks())
    assert sorted(itertools.chain(*batches)) == list(range(512))
    assert max(int(lengths[batch].sum()) for batch in batches) <= 140
    with pytest.raises(BalanceError, match=r"step 0 of epoch 0 needs \d"):
        sampler(np.sort(lengths)[::-1], shuffle=False, **options)


@pytest.mark.parametrize("given_before", range(9))
def test_a_state_goes_on_in_the_middle_of_a_step(given_before):
    first = sampler(lengths_of(64))
    first.set_epoch(2)
    expected = list(first)
    list(itertools.islice(first, given_before))
    state = pickle.loads(pickle.dumps(first.state_dict()))
    resumed = sampler(lengths_of(64))
    resumed.load_state_dict(state)
    assert list(resumed) == expected[given_before:]
    assert list(resumed) == expected  # the next iteration starts anew
    with pytest.raises(BalanceError, match="other lengths or options"):
        sampler(lengths_of(64), seed=1).load_state_dict(state)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_stream_gives_what_the_sampler_gives(num_workers):
    rows = [{"id": index, "tokens": [0] * int(length)} for index, length in enumerate(lengths_of(70))]
    options = {"global_batch_size": 16, "num_microbatches": 2, "num_replicas": 2, "rank": 1}
    stream = BalancedStream(rows, length=lambda row: len(row["tokens"]), **options)
    loader = DataLoader(stream, batch_size=None, num_workers=num_workers)
    given_ids = [[row["id"] for row in batch] for batch in loader]
    assert given_ids == list(BalancedBatchSampler(lengths_of(70), shuffle=False, **options))
    with pytest.raises(BalanceError, match="needs 4 for its micro-batches"):
        BalancedStream(rows, length=len, **{**options, "global_batch_size": 3})
    stream.load_state_dict({"microbatches": 3})
    assert [[row["id"] for row in batch] for batch in stream] == given_ids[3:]


def test_lengths_come_from_columns_or_a_file(tmp_path):
    rows = [{"text": "ab", "input_ids": [1, 2, 3]}, {"text": "c", "input_ids": [4]}]
    assert dataset_lengths(rows).tolist() == [3, 1]
    packs = [{"seq_lengths": [2, 3], "input_ids": [0] * 5}, {"seq_lengths": [4], "input_ids": [0] * 4}]
    assert list(map(list, dataset_lengths(packs))) == [[2, 3], [4]]
    (tmp_path / "packs.jsonl").write_text("[2, 3]\n[4]\n")
    assert list(map(list, dataset_lengths(tmp_path / "packs.jsonl"))) == [[2, 3], [4]]
    with pytest.raises(BalanceError, match=r"the data set, row 1 has no 'size', but text, input_ids"):
        dataset_lengths(rows, column="size")
    with pytest.raises(BalanceError, match="the data set, row 2 is -1"):
        dataset_lengths([{"length": 3}, {"length": -1}])


def test_fsdp2_trains_as_one_rank_would_sample_by_sample():
    """Losses and gradient norms of steps whose weights are sharded, against all samples alone on one rank."""
    for steps in run_ranks(2, "loader_cases:fsdp2"):
        for sharded, alone in steps:
            assert sharded == pytest.approx(alone, rel=2e-6)
