"""Batches of a Megatron dataloader → samples."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_balance import BalanceError
from megatron_balance.samples import pack_microbatch, split_packed

PAD = 0


def collated(rows, *, padded_seq_len, num_entries=None, padding_counts=True):
    """default_collate's batch of SFTDataset's rows: each row a list of token lists, the rest of the row padding.

    With `padding_counts` the padding belongs to the row's last sequence, as in Megatron 0.19.
    """
    num_entries = num_entries or padded_seq_len + 1
    tokens = torch.full((len(rows), padded_seq_len), PAD)
    cu_seqlens = torch.full((len(rows), num_entries), padded_seq_len, dtype=torch.int32)
    position_ids = torch.zeros((len(rows), padded_seq_len), dtype=torch.int64)
    for row, sequences in enumerate(rows):
        ends = [0]
        for sequence in sequences:
            tokens[row, ends[-1] : ends[-1] + len(sequence)] = torch.tensor(sequence)
            ends.append(ends[-1] + len(sequence))
        if padding_counts:
            ends[-1] = padded_seq_len
        for start, end in itertools.pairwise(ends):
            position_ids[row, start:end] = torch.arange(end - start)
        cu_seqlens[row, : len(ends)] = torch.tensor(ends, dtype=torch.int32)
        if not padding_counts:
            cu_seqlens[row, len(ends) :] = ends[-1]
    return {
        "tokens": tokens,
        "labels": tokens.roll(-1, 1),
        "loss_mask": (tokens != PAD).float(),
        "position_ids": position_ids,
        "cu_seqlens": cu_seqlens,
        "max_seqlen": cu_seqlens.diff(dim=1).amax(1),
        "attention_mask": None,
    }


sequences = st.lists(st.integers(1, 9), min_size=1, max_size=7)
rows = st.lists(st.lists(sequences, min_size=1, max_size=4), min_size=1, max_size=3)


@given(rows, st.integers(0, 5), st.booleans(), st.sampled_from([(1, 1), (4, 1), (4, 2)]))
def test_split_then_pack_keeps_every_token_with_a_loss(rows, spare, padding_counts, parallel):
    token_multiple, cp_size = parallel
    padded_seq_len = max(sum(map(len, row)) for row in rows) + spare
    batch = collated(rows, padded_seq_len=padded_seq_len, padding_counts=padding_counts)
    samples = split_packed(batch)
    assert [sample.per_token["tokens"].tolist() for sample in samples] == [sequence for row in rows for sequence in row]
    pack = pack_microbatch(samples, token_multiple=token_multiple, cp_size=cp_size)
    for name in ("tokens", "labels", "position_ids"):
        assert torch.equal(pack[name][pack["loss_mask"] != 0], batch[name][batch["loss_mask"] != 0])
    # A pack is its own normal form: splitting and packing it again changes nothing.
    again = pack_microbatch(split_packed(pack), token_multiple=token_multiple, cp_size=cp_size)
    assert again.keys() == pack.keys()
    assert all(torch.equal(again[name], pack[name]) for name in pack)


@given(rows, st.integers(0, 5), st.booleans(), st.sampled_from([(1, 1), (4, 1), (4, 2)]))
def test_a_row_that_stays_whole_packs_like_its_sequences(rows, spare, padding_counts, parallel):
    token_multiple, cp_size = parallel
    padded_seq_len = max(sum(map(len, row)) for row in rows) + spare
    batch = collated(rows, padded_seq_len=padded_seq_len, padding_counts=padding_counts)
    samples = split_packed(batch, unit="sample")
    assert [sample.segment_lengths for sample in samples] == [tuple(map(len, row)) for row in rows]
    for sample, row in zip(samples, rows, strict=True):
        assert sample.per_token["tokens"].tolist() == [token for sequence in row for token in sequence]
    pack = pack_microbatch(samples, token_multiple=token_multiple, cp_size=cp_size)
    apart = pack_microbatch(split_packed(batch), token_multiple=token_multiple, cp_size=cp_size)
    assert pack.keys() == apart.keys()
    assert all(torch.equal(pack[name], apart[name]) for name in pack)
    # What was padded between its sequences comes back without.
    (whole,) = split_packed(pack, unit="sample")
    assert whole.segment_lengths == tuple(length for sample in samples for length in sample.segment_lengths)
    assert torch.equal(whole.per_token["tokens"], torch.cat([sample.per_token["tokens"] for sample in samples]))


def test_a_row_that_stays_whole_carries_what_is_one_a_row():
    batch = collated([[[1, 2], [3]], [[4], [5]], [[6]]], padded_seq_len=5)
    batch["weight"] = torch.tensor([0.5, 0.25, 1.0])
    samples = split_packed(batch, unit="sample")
    assert [sample.per_sample["weight"].item() for sample in samples] == [0.5, 0.25, 1.0]
    # Nothing was between the sequences: no copy.
    assert samples[0].per_token["tokens"].data_ptr() == batch["tokens"].data_ptr()
    batch["sequence_id"] = torch.arange(5)
    with pytest.raises(BalanceError, match=r"sequence_id has shape \[5\]: .* is segment, 5 \(one a sequence\)"):
        split_packed(batch, unit="sample")


def test_a_row_without_tokens_makes_no_sample():
    batch = collated([[[1, 2]], [[3]]], padded_seq_len=3)
    batch["cu_seqlens"][1], batch["loss_mask"][1] = 0, 0
    (sample,) = split_packed(batch, unit="sample")
    assert sample.per_token["tokens"].tolist() == [1, 2]


def test_an_unknown_unit():
    with pytest.raises(BalanceError, match="unit is 'row': it must be one of segment, sample"):
        split_packed(collated([[[1]]], padded_seq_len=1), unit="row")


def test_a_masked_constant_tail_is_stripped():
    batch = collated([[[5, 6, 7], [8]]], padded_seq_len=9)
    assert [sample.length for sample in split_packed(batch)] == [3, 1]
    # Another token id, or a token with a loss, ends the tail.
    batch["tokens"][0, 5] = 4
    assert [sample.length for sample in split_packed(batch)] == [3, 3]
    batch["loss_mask"][0, 7] = 0.5
    assert [sample.length for sample in split_packed(batch)] == [3, 5]


def test_one_token_stays_of_a_masked_sequence():
    batch = collated([[[5, 6]]], padded_seq_len=4)
    batch["tokens"][:] = PAD
    batch["loss_mask"][:] = 0
    (sample,) = split_packed(batch)
    assert sample.per_token["tokens"].tolist() == [PAD]


def test_without_loss_mask_nothing_is_stripped():
    batch = {**collated([[[5, 6]]], padded_seq_len=4), "loss_mask": None}
    assert [sample.length for sample in split_packed(batch)] == [4]


def test_without_cu_seqlens_a_row_is_a_sequence():
    batch = {**collated([[[5, 6]], [[7]]], padded_seq_len=4), "cu_seqlens": None}
    assert [sample.per_token["tokens"].tolist() for sample in split_packed(batch)] == [[5, 6], [7]]


def test_cu_seqlens_padded_says_where_sequences_start():
    batch = {
        "tokens": torch.tensor([[1, 2, 3, 0, 4, 5, 0, 0], [1, 2, 3, 4, 5, 6, 7, 8]]),
        "loss_mask": torch.tensor([[1, 1, 1, 0, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1, 1, 1]]).float(),
        # The right padding of cu_seqlens is the row's length, which here is no end of a sequence.
        "cu_seqlens": torch.tensor([[0, 3, 5, 8], [0, 8, 8, 8]], dtype=torch.int32),
        "cu_seqlens_padded": torch.tensor([[0, 4, 8, 8], [0, 8, 8, 8]], dtype=torch.int32),
    }
    assert [sample.per_token["tokens"].tolist() for sample in split_packed(batch)] == [
        [1, 2, 3],
        [4, 5],
        [1, 2, 3, 4, 5, 6, 7, 8],
    ]


def test_other_keys():
    batch = collated([[[1, 2], [3]], [[4]]], padded_seq_len=5)
    batch["logits"] = torch.arange(10).view(2, 5, 1).expand(2, 5, 3)
    batch["weight"] = torch.tensor([0.5, 0.25])
    batch["sequence_id"] = torch.tensor([[10], [11], [12]])
    samples = split_packed(batch)
    assert [sample.per_sample["weight"].item() for sample in samples] == [0.5, 0.5, 0.25]
    assert [sample.per_sample["sequence_id"].tolist() for sample in samples] == [[10], [11], [12]]
    assert samples[2].per_token["logits"].tolist() == [[5, 5, 5]]
    assert samples[0].per_token.keys() == {"tokens", "labels", "loss_mask", "position_ids", "logits"}


def set_value(key, index, value):
    def change(batch):
        batch[key][index] = value

    return change


@pytest.mark.parametrize(
    ("change", "phrase"),
    [
        (set_value("cu_seqlens", (1, 0), 1), "Row 1: cu_seqlens begins elsewhere than at 0"),
        (set_value("cu_seqlens", (1, 2), 1), "Row 1: cu_seqlens falls"),
        (set_value("cu_seqlens", (0, -1), 9), "Row 0: cu_seqlens ends past the row's 6"),
        (set_value("loss_mask", (1, 2), float("nan")), "Row 1: loss_mask holds NaN"),
        (set_value("loss_mask", (1, 2), float("inf")), "Row 1: loss_mask holds NaN or infinity"),
        (set_value("tokens", (1, 2), -1), "Row 1: tokens holds -1"),
        (lambda batch: batch.update(tokens=batch["tokens"].float()), r"tokens is torch\.float32"),
        (lambda batch: batch.update(labels=batch["labels"].double()), r"labels is torch\.float64"),
        (lambda batch: batch.update(cu_seqlens=batch["cu_seqlens"].float()), r"cu_seqlens is torch\.float32"),
        (lambda batch: batch.update(labels=batch["labels"][:, :5]), r"labels has shape \[2, 5\] and tokens \[2, 6\]"),
        (lambda batch: batch.update(tokens=None), "needs tokens"),
        (lambda batch: batch.update(tokens=batch["tokens"][0]), "needs tokens"),
        (lambda batch: batch.update(cu_seqlens=batch["cu_seqlens"][0]), r"cu_seqlens has shape \[7\]"),
        (lambda batch: batch.update(text=["a", "b"]), "text is a list"),
        (lambda batch: batch.update(step=torch.tensor(1)), r"step has shape \[\]"),
        (lambda batch: batch.update(step=torch.zeros(7)), r"step has shape \[7\]"),
        (lambda batch: batch["cu_seqlens"][1].clamp_(max=3), "Row 1: 1 tokens with loss_mask lie outside"),
        (
            lambda batch: batch.update(cu_seqlens_padded=torch.tensor([[0, 1, 6, 6, 6, 6, 6]] * 2)),
            r"Row 0: its sequences have \[2, .* and room for \[1, 5",
        ),
        (lambda batch: batch.update(cu_seqlens_padded=torch.tensor([[0, 6]] * 2)), "they must be equal"),
    ],
)
def test_a_bad_batch_says_where(change, phrase):
    batch = collated([[[1, 2], [3]], [[4, 5], [6, 7]]], padded_seq_len=6)
    change(batch)
    with pytest.raises(BalanceError, match=phrase):
        split_packed(batch)


def test_the_dataset_of_megatron(monkeypatch):
    """SFTDataset 0.19 itself, two rows through default_collate."""
    sft_dataset = pytest.importorskip("megatron.training.datasets.sft_dataset")

    class Tokenizer:
        eod, pad = 1, 0

        def tokenize_conversation(self, conversation, **_):
            tokens = torch.tensor([*conversation[0]["tokens"], self.eod])
            return tokens, tokens.clone()

    class Config:
        tokenizer = Tokenizer()
        sequence_length = 12
        context_parallel_size = 1
        reset_position_ids = create_attention_mask = reset_attention_mask = False

    conversations = [[[5, 6, 7], [8, 9]], [[2, 3, 4, 5, 6]]]
    dataset = object.__new__(sft_dataset.SFTDataset)
    dataset.config, dataset.indices = Config(), [0, 1]
    dataset.dataset = [[{"role": "system", "tokens": tokens} for tokens in row] for row in conversations]
    batch = torch.utils.data.default_collate([dataset[0], dataset[1]])
    assert batch["cu_seqlens"].shape == (2, 13)
    # The end-of-document token stays: its label, the next conversation's first token or padding, decides its mask.
    tokens = [sample.per_token["tokens"].tolist() for sample in split_packed(batch)]
    assert tokens == [[5, 6, 7, 1], [8, 9, 1], [2, 3, 4, 5, 6, 1]]
