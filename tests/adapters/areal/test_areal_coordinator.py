"""AReaL's real coordinator and batch splitting over four gloo ranks; bodies in areal_coordinator_cases.py."""

import numpy as np
import pytest
from areal_trajectories import digest, make_trajectory, random_lengths
from areal_world import HAS_AREAL

from megatron_balance.adapters.areal.trajectories import trimmed

if not HAS_AREAL:
    pytest.skip("AReaL is not installed: scripts/adapter_env.sh areal", allow_module_level=True)
CASES = "areal_coordinator_cases"


def lengths_of_heads(counts):
    """Ranks 0 and 2 are the data-parallel heads; the others have no rollouts."""
    rng = np.random.default_rng(1)
    return [random_lengths(rng, num_trajectories=count) for count in (counts[0], 0, counts[1], 0)]


def check_batches(results, lengths, *, sources):
    rolled_out = {100 * rank + number: rows for rank in sources for number, rows in enumerate(lengths[rank])}
    for head, follower in ((0, 1), (2, 3)):
        assert results[head]["ids"] == results[follower]["ids"]
        assert results[head]["digests"] == results[follower]["digests"]
    assert sorted(results[0]["ids"] + results[2]["ids"]) == sorted(rolled_out)
    for result in results:
        expected = [digest(trimmed(make_trajectory(number, rolled_out[number]))) for number in result["ids"]]
        assert result["digests"] == expected
    assert abs(len(results[0]["ids"]) - len(results[2]["ids"])) <= 1


@pytest.mark.parametrize("method", ["rollout_batch", "prepare_batch"])
@pytest.mark.parametrize("counts", [(6, 6), (8, 7)])
def test_every_head_rolls_out(world4, method, counts):
    """Numbers that differ among them: AReaL raises."""
    lengths = lengths_of_heads(counts)
    results = world4.run(f"{CASES}:coordinate", lengths=lengths, method=method, single_rank_load=False)
    assert [result["calls"] for result in results] == [[method], [], [method], []]
    check_batches(results, lengths, sources=[0, 2])


@pytest.mark.parametrize("method", ["rollout_batch", "prepare_batch"])
def test_one_rank_rolls_out_for_all(world4, method):
    """R43, R56: a scatter from rank 0; the other head has rollouts it could load, and does not."""
    lengths = lengths_of_heads((15, 5))
    results = world4.run(f"{CASES}:coordinate", lengths=lengths, method=method, single_rank_load=True)
    assert [result["calls"] for result in results] == [[method], [], [], []]
    check_batches(results, lengths, sources=[0])


def test_a_rollout_that_fails_raises_on_every_rank(world4):
    results = world4.run(
        f"{CASES}:coordinate",
        lengths=lengths_of_heads((4, 4)),
        method="prepare_batch",
        single_rank_load=True,
        fails_on=0,
    )
    assert [result["ranks"] for result in results] == [4] * 4
    assert results[0]["error"] == ("ConnectionError", "the inference server is gone")
    for result in results[1:]:
        assert result["error"][0] == "BalanceError"
        assert (
            "rank 0, which loads for all, failed: ConnectionError: the inference server is gone" in result["error"][1]
        )


def test_what_one_head_finds_wrong_raises_on_ranks_without_data_too(world4):
    results = world4.run(
        f"{CASES}:coordinate",
        lengths=lengths_of_heads((4, 4)),
        method="rollout_batch",
        single_rank_load=False,
        without_mask_on=2,
    )
    assert [result["ranks"] for result in results] == [4] * 4
    assert all(result["error"][0] == "BalanceError" for result in results)
    assert all("attention_mask" in result["error"][1] for result in results)


@pytest.mark.parametrize("gather_all", [False, True])
def test_the_result_is_areals(world4, gather_all):
    lengths = [[[3, 5]], [[2], [9]], [[7]], [[1, 1, 1]]]
    ids = [0, 100, 101, 200, 300]
    results = world4.run(f"{CASES}:redistribute_as_areal_does", lengths=lengths, gather_all=gather_all)
    assert sorted(index for part in results[0]["group_indices"] for index in part) == [0, 1, 2, 3, 4]
    for rank, result in enumerate(results):
        own = results[0]["group_indices"][rank]
        assert (result["type"], result["rank"]) == ("RedistributedData", rank)
        assert result["group_indices"] == results[0]["group_indices"]
        assert result["ids"] == [ids[index] for index in own]
        assert result["all"] == [ids[index] if gather_all or index in own else None for index in range(5)]


def test_a_padded_batch_is_split_alike_on_every_rank(world4):
    rng = np.random.default_rng(2)
    lengths = [rng.integers(1, 100, count).tolist() for count in (30, 12, 21, 16)]
    results = world4.run(f"{CASES}:micro_batches", lengths=lengths, max_tokens=400, n_mbs_divisor=2)
    assert len({len(slots) for slots, _ in results}) == 1
    for (slots, tokens), of_rank in zip(results, lengths, strict=True):
        assert sorted(row for slot in slots for row in slot) == list(range(len(of_rank)))
        assert tokens == [sum(of_rank[row] for row in slot) for slot in slots]
        assert max(tokens) <= 400
        assert len(slots) % 2 == 0


@pytest.mark.parametrize(
    ("lengths", "text"),
    [
        ([[50], [500], [50], [50]], "500 tokens and max_tokens_per_mb is 400"),
        ([[300] * 5, [5] * 9, [3, 4], [1] * 7], "2 rows for 5 micro-batches"),
    ],
)
def test_a_batch_that_one_rank_cannot_split_raises_on_all(world4, lengths, text):
    results = world4.run(f"{CASES}:micro_batches", lengths=lengths, max_tokens=400)
    assert len(set(results)) == 1
    assert text in results[0][0]
    assert results[0][1] == 4
