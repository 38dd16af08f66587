"""Packs of samples that begin alike, against the definition: a token for each distinct prefix."""

import numpy as np
import pytest
import torch

from megatron_balance.errors import BalanceError
from megatron_balance.samples.prefix_packing import PrefixTree, check_shareable, pack_shared
from megatron_balance.samples.sample import Samples

Pairs = list[tuple[int, int]]


def samples_of(rows, masks, **others):
    columns = {
        "tokens": [torch.tensor([token for token, _ in row]) for row in rows],
        "labels": [torch.tensor([label for _, label in row]) for row in rows],
        "loss_mask": [torch.tensor(mask) for mask in masks],
        **others,
    }
    lengths = np.array([len(row) for row in rows])
    return Samples.from_columns(columns, kinds=dict.fromkeys(columns, "per_token"), lengths=lengths)


def random_rows(rng, count):
    """Few tokens and few labels, so that rows begin alike, some begin others, and some are equal."""
    rows = []
    for _ in range(count):
        start = rows[rng.integers(len(rows))] if rows and rng.random() < 0.7 else []
        kept = start[: rng.integers(len(start) + 1)]
        added = [(int(token), int(label)) for token, label in rng.integers(0, 3, (rng.integers(0, 6), 2))]
        rows.append(kept + added or [(0, 0)])
    return sorted(rows)  # a depth-first order of their trie


def common(first, second):
    return next(
        (index for index, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second))
    )


def seen_by(tree):
    """`[num_tokens, num_tokens]` what each token attends to: those before it in its samples."""
    places = np.arange(tree.positions.size)
    return (places <= places[:, None]) & (places[:, None] < tree.ends)


@pytest.mark.parametrize("seed", range(4))
def test_a_pack_has_a_token_for_each_distinct_prefix(seed):
    rng = np.random.default_rng(seed)
    for _ in range(100):
        check_pack(rng)


def check_pack(rng):
    rows = random_rows(rng, int(rng.integers(0, 9)))
    masks = [rng.integers(0, 3, len(row)).astype(np.float32).tolist() for row in rows]
    shared = [0, *(common(a, b) for a, b in zip(rows, rows[1:], strict=False))][: len(rows)]
    prefixes = {tuple(row[: end + 1]): 0.0 for row in rows for end in range(len(row))}
    for row, mask in zip(rows, masks, strict=True):
        for end, weight in enumerate(mask):
            prefixes[tuple(row[: end + 1])] += weight
    num_tokens = len(prefixes) + int(rng.integers(not rows, 200))

    samples = samples_of(rows, masks)
    if not rows:
        samples = Samples(samples_of([[(0, 0)]], [[0.0]]).schema, {}, np.zeros(0, dtype=np.int64))
    tree = PrefixTree.of([*map(len, rows)], shared, num_tokens=num_tokens)
    batch = pack_shared(samples, tree=tree)
    tokens, labels, mask, positions = (
        batch[name][0].tolist() for name in ("tokens", "labels", "loss_mask", "position_ids")
    )
    seen, times = seen_by(tree), tree.multiplicity
    assert batch["cu_seqlens"].tolist() == [[0, num_tokens]]
    assert positions == tree.positions.tolist()
    assert batch["max_seqlen"].item() == max(positions) + 1
    real = np.flatnonzero(times)
    found = {}
    for place in real:
        path = np.flatnonzero(seen[place])
        assert [positions[token] for token in path] == [*range(positions[place] + 1)]
        found[tuple((tokens[token], labels[token]) for token in path)] = mask[place]
        assert times[place] == sum(
            row[: len(path)] == [(tokens[token], labels[token]) for token in path] for row in rows
        )
    assert found == prefixes
    assert len(real) == len(prefixes)
    filler = np.flatnonzero(times == 0)
    assert not any(mask[place] for place in filler)
    assert not seen[np.ix_(real, filler)].any()
    assert not seen[np.ix_(filler, real)].any()


def test_what_differs_is_not_shared():
    rows = [[(1, 2), (2, 3), (3, 4)], [(1, 2), (2, 3), (3, 5)]]
    masks = [[0.0, 0.0, 1.0]] * 2
    with pytest.raises(BalanceError, match="begin alike, and labels differs"):
        pack_shared(samples_of(rows, masks), tree=PrefixTree.of([3, 3], [0, 3], num_tokens=3))
    advantages = [torch.tensor([0.0, 0.0, 1.0]), torch.tensor([0.0, 1.0, 1.0])]
    with pytest.raises(BalanceError, match="begin alike, and advantages differs"):
        pack_shared(samples_of(rows, masks, advantages=advantages), tree=PrefixTree.of([3, 3], [0, 2], num_tokens=4))


def test_keys_without_a_place_in_a_shared_pack_are_refused():
    columns = {"tokens": [torch.zeros(2, dtype=torch.int64)], "reward": [torch.ones(())]}
    samples = Samples.from_columns(
        columns, kinds={"tokens": "per_token", "reward": "per_sample"}, lengths=np.array([2])
    )
    with pytest.raises(BalanceError, match=r"keys that are not of tokens \(reward\)"):
        check_shareable(samples)
    check_shareable(samples_of([[(0, 0)]], [[1.0]], reward=[torch.ones(1)]), weighting="reward")
    with pytest.raises(BalanceError, match="no loss_mask of numbers"):
        check_shareable(samples_of([[(0, 0)]], [[True]]))
    with pytest.raises(BalanceError, match="do not count the tokens of a sample from 0"):
        check_shareable(samples_of([[(0, 0)] * 2], [[1.0] * 2], position_ids=[torch.tensor([1, 2])]))
