"""Shared prefixes found by hashes: against the tokens themselves, over ranks, and where hashes collide."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from exchange_cases import responses
from sample_rows import Sample, samples_of

from megatron_balance import Forest
from megatron_balance.samples.shared_prefixes import hash_chains


def forest_of(rows, *, block=8, bits=64):
    """The forest of samples, by hashes of so many bits."""
    samples = samples_of(rows)
    chains = hash_chains(samples, block=block)
    cut = replace(chains, hashes=chains.hashes & np.uint64(2**bits - 1))
    forest = Forest.from_chains(samples.lengths, cut)
    assert forest.lengths.tolist() == samples.lengths.tolist()
    Forest.from_nodes(forest.node_tokens, forest.parent, forest.node_of)
    return forest


def shared(forest, first, second):
    """Tokens of the nodes that two samples have in common."""
    common = np.intersect1d(forest.paths[:, first], forest.paths[:, second])
    return int(forest.node_tokens[common[common >= 0]].sum())


def equal_tokens(first, second, names=("tokens", "labels")):
    """Tokens at the start of two samples that have equal keys."""
    length = min(first.length, second.length)
    same = torch.stack([first.tensors[name][:length] == second.tensors[name][:length] for name in names]).all(0)
    return int(same.long().cumprod(0).sum())


def labelled(tokens, *, prompt):
    """A response whose label is the next token, trained from the prompt's last token on."""
    ids, mask = torch.from_numpy(tokens), torch.ones(tokens.size)
    mask[: prompt - 1] = 0
    return Sample({"tokens": ids, "labels": torch.cat([ids[1:], ids.new_tensor([-100])]), "loss_mask": mask})


@pytest.mark.parametrize("seed", range(20))
def test_responses_share_their_whole_prompt(seed):
    """All but its last token, whose label is each response's own; the rest by whole blocks."""
    rows = responses(seed, groups=6, size=4)
    forest = forest_of(rows)
    for first in range(len(rows)):
        for second in range(first):
            equal = equal_tokens(rows[first], rows[second])
            if first // 4 == second // 4:
                assert shared(forest, first, second) == equal
            else:
                assert shared(forest, first, second) == equal // 8 * 8


@pytest.mark.parametrize("seed", range(10))
def test_a_forest_is_that_of_the_tokens_for_any_samples(seed):
    """Trees of any depth, samples that begin others, and equal ones, without masks: shared by whole blocks."""
    rng = np.random.default_rng(seed)
    texts = [rng.integers(0, 9, 40)]
    for _ in range(30):
        base = texts[rng.integers(len(texts))]
        texts.append(np.concatenate([base[: rng.integers(base.size + 1)], rng.integers(0, 9, rng.integers(30))]))
    rows = [Sample({"tokens": torch.from_numpy(text)}) for text in texts]
    forest = forest_of(rows, block=4)
    for first in range(len(texts)):
        for second in range(first):
            # The label is the next token, and behind the last one -1.
            ends = [np.append(texts[index], -1) for index in (first, second)]
            length = min(map(len, ends))
            equal = int((ends[0][:length] == ends[1][:length]).cumprod().sum())
            assert shared(forest, first, second) == max(equal - 1, 0) // 4 * 4


@pytest.mark.parametrize("change", ["tokens swapped", "blocks swapped", "shifted", "labels", "advantages"])
def test_what_differs_is_told_apart(change):
    rng = np.random.default_rng(1)
    tokens = torch.from_numpy(rng.integers(0, 50, 32))
    tokens[1] = tokens[0] + 1
    keys = {"tokens": tokens, "labels": tokens.clone(), "advantages": torch.zeros(32, dtype=torch.float64)}
    other = {name: values.clone() for name, values in keys.items()}
    if change == "tokens swapped":
        other["tokens"][:2] = tokens[:2].flip(0)
    elif change == "blocks swapped":
        other["tokens"] = torch.cat([tokens[8:16], tokens[:8], tokens[16:]])
    elif change == "shifted":
        keys["tokens"] = torch.zeros(32, dtype=torch.int64)
        other["tokens"] = torch.cat([torch.zeros(9, dtype=torch.int64), tokens[:23]])
    else:
        other[change][8] += 1
    expected = 0 if "swapped" in change else 8
    assert shared(forest_of([Sample(keys), Sample(other)]), 0, 1) == expected


def test_samples_that_train_other_tokens_share_what_is_before():
    """The mask is no part of the hashes; where the first trained label differs, chains part at the nearer one."""
    tokens = np.arange(64)
    rows = [labelled(tokens, prompt=prompt) for prompt in (21, 21, 31, 33)]
    rows[1].tensors["loss_mask"][40:] = 0
    forest = forest_of(rows)
    assert [shared(forest, *pair) for pair in ((0, 1), (0, 2), (2, 3), (0, 3))] == [64, 16, 24, 16]


@pytest.mark.parametrize("bits", [0, 4, 8])
def test_hashes_that_collide_share_too_much_and_comparing_tokens_finds_it(bits):
    rows = responses(3, groups=40, size=2)
    forest = forest_of(rows, bits=bits, block=128)
    wrong = [
        pair
        for pair in pairwise(forest.order.tolist())
        if shared(forest, *pair) > equal_tokens(rows[pair[0]], rows[pair[1]])
    ]
    assert wrong, "the hashes were cut so that they collide"


def test_ranks_build_one_forest_in_any_order_of_arrival(run_cases):
    forests = run_cases(2, "forest_of_ranks", numbers=[3, 9])
    assert forests[0] == forests[1]
    rows = responses(7, groups=4, size=3)
    expected = forest_of(rows, block=128)
    assert forests[0] == [expected.node_tokens.tolist(), expected.parent.tolist(), expected.node_of.tolist()]
    mirrored = forest_of(rows[::-1], block=128)
    assert sorted(mirrored.node_tokens.tolist()) == sorted(expected.node_tokens.tolist())


@pytest.mark.parametrize("numbers", [[0, 12], [0, 0]])
def test_ranks_without_samples_take_part(run_cases, numbers):
    first, second = run_cases(2, "forest_of_ranks", numbers=numbers)
    assert first == second
    assert len(first[2]) == sum(numbers)
