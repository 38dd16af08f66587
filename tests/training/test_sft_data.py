"""The SFT data set that tests train on: what a row shows, and where it is cut. No public name."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sft_dataset import END_OF_DOCUMENT, SftDataset, SftSample, builtin_samples, stdlib_samples

from megatron_balance import BalanceError
from megatron_balance.runtime import split_packed


def dataset(samples: list[SftSample], *, seq_length: int = 16, pad: bool = False, num_samples: int = 100) -> SftDataset:
    return SftDataset(
        samples, num_samples=num_samples, seq_length=seq_length, pad_to_seq_length=pad, pad_token=0, seed=7
    )


def sample(tokens: list[int], learned: list[int]) -> SftSample:
    return SftSample(np.array(tokens), np.array(learned, dtype=bool))


def test_a_row_predicts_the_next_token_of_the_response() -> None:
    row = dataset([sample([10, 11, 12, 13, 14], [0, 0, 1, 1, 1])])[0]
    assert row["tokens"].tolist() == [10, 11, 12, 13]
    assert row["labels"].tolist() == [11, 12, 13, 14]
    assert row["loss_mask"].tolist() == [0, 1, 1, 1]
    assert row["position_ids"].tolist() == [0, 1, 2, 3]
    assert row["cu_seqlens"].tolist() == [0, 4]
    assert int(row["max_seqlen"]) == 4


def test_padding_is_stripped_again_before_balancing() -> None:
    plain = dataset([sample([10, 11, 12, 13, 14], [0, 0, 1, 1, 1])])[0]
    padded = dataset([sample([10, 11, 12, 13, 14], [0, 0, 1, 1, 1])], pad=True)[0]
    assert padded["tokens"].shape == (16,)
    [back] = split_packed({key: value.unsqueeze(0) for key, value in padded.items()})
    for key in ("tokens", "labels", "loss_mask", "position_ids"):
        assert torch.equal(back.per_token[key], plain[key])


def test_long_samples_are_cut_and_those_without_a_learned_token_dropped() -> None:
    long, prompt_only = sample(list(range(40)), [0] + [1] * 39), sample(list(range(40)), [0] * 20 + [1] * 20)
    rows = dataset([long, prompt_only])
    assert len(rows.samples) == 1
    assert rows.length(0) == 16
    with pytest.raises(BalanceError, match="no sample has a token to learn within --seq-length 16"):
        dataset([prompt_only])


def test_the_order_depends_on_seed_and_index_alone_and_changes_every_epoch() -> None:
    samples = [sample([index, index + 1], [0, 1]) for index in range(20)]
    first, second = dataset(samples), dataset(samples)
    order = [int(first[index]["tokens"][0]) for index in range(40)]
    assert order[30:] == [int(second[index]["tokens"][0]) for index in range(30, 40)]
    assert sorted(order[:20]) == sorted(order[20:]) == list(range(20))
    assert order[:20] != order[20:]


def test_the_built_in_corpus_is_uneven_and_large_enough() -> None:
    lengths = np.array([len(sample.prompt) + len(sample.response) for sample in stdlib_samples()])
    assert lengths.size > 3000
    assert np.percentile(lengths, 99) > 15 * np.median(lengths)
    first = builtin_samples()[0]
    assert first.tokens[-1] == END_OF_DOCUMENT
    assert first.learned[-1]
    assert not first.learned[0]
