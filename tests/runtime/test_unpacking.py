"""Batches of a dataloader, Megatron's or Megatron-Bridge's → samples."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sample_rows import rows_of

from megatron_balance import BalanceError
from megatron_balance.samples.packing import pack_microbatch, with_attention_keys
from megatron_balance.samples.unpacking import split_packed, with_cu_seqlens

PAD = 0


def collated(rows, *, padded_seq_len, padding_counts=True):
    """default_collate's batch of SFTDataset's rows: each row a list of token lists, the rest of the row padding.

    With `padding_counts` the padding belongs to the row's last sequence, as in Megatron 0.19.
    """
    tokens = torch.full((len(rows), padded_seq_len), PAD)
    cu_seqlens = torch.full((len(rows), padded_seq_len + 1), padded_seq_len, dtype=torch.int32)
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


def tokens_of(samples):
    return [tokens.tolist() for tokens in samples.columns["tokens"]]


@given(rows, st.integers(0, 5), st.booleans(), st.sampled_from([(1, 1), (4, 1), (4, 2)]))
def test_split_then_pack_keeps_every_token_with_a_loss(rows, spare, padding_counts, parallel):
    token_multiple, cp_size = parallel
    padded_seq_len = max(sum(map(len, row)) for row in rows) + spare
    batch = collated(rows, padded_seq_len=padded_seq_len, padding_counts=padding_counts)
    samples = split_packed(batch)
    assert tokens_of(samples) == [sequence for row in rows for sequence in row]
    pack = pack_microbatch(samples, token_multiple=token_multiple, cp_size=cp_size)
    for name in ("tokens", "labels", "position_ids"):
        assert torch.equal(pack[name][pack["loss_mask"] != 0], batch[name][batch["loss_mask"] != 0])
    # A pack is its own normal form.
    packed = pack_microbatch(split_packed(pack), token_multiple=token_multiple, cp_size=cp_size)
    assert packed.keys() == pack.keys()
    assert all(torch.equal(packed[name], pack[name]) for name in pack)
    # Megatron-Bridge has other names for the same.
    assert with_cu_seqlens(pack) == pack
    renamed = with_attention_keys(pack)
    assert not {"cu_seqlens", "cu_seqlens_padded", "max_seqlen"} & renamed.keys()
    assert renamed["cu_seqlens_kv"] is renamed["cu_seqlens_q"]
    back = with_cu_seqlens(renamed)
    assert back.keys() == pack.keys() - {"max_seqlen"}
    assert all(torch.equal(back[name], pack[name]) for name in back)


def test_other_keys_are_per_token_one_a_row_or_one_a_sequence():
    batch = collated([[[1, 2], [3]], [[4], [5]], [[6]]], padded_seq_len=5)
    batch["logits"] = torch.arange(15).view(3, 5, 1).expand(3, 5, 3)
    batch["weight"] = torch.tensor([0.5, 0.25, 1.0])
    batch["sequence_id"] = torch.tensor([[10], [11], [12], [13], [14]])
    samples = rows_of(split_packed(batch))
    assert [sample.per_sample["weight"].item() for sample in samples] == [0.5, 0.5, 0.25, 0.25, 1.0]
    assert [sample.per_sample["sequence_id"].tolist() for sample in samples] == [[10], [11], [12], [13], [14]]
    assert samples[3].per_token["logits"].tolist() == [[6, 6, 6]]
    assert samples[0].per_token.keys() == {"tokens", "labels", "loss_mask", "position_ids", "logits"}
    assert samples[0].per_token["tokens"].data_ptr() == batch["tokens"].data_ptr()  # no copy


def test_a_row_without_tokens_makes_no_sample():
    batch = collated([[[1, 2]], [[3]]], padded_seq_len=3)
    batch["cu_seqlens"][1], batch["loss_mask"][1] = 0, 0
    assert tokens_of(split_packed(batch)) == [[1, 2]]


def test_a_masked_constant_tail_is_stripped():
    batch = collated([[[5, 6, 7], [8]]], padded_seq_len=9)
    assert tokens_of(split_packed(batch)) == [[5, 6, 7], [8]]
    assert tokens_of(split_packed(batch | {"cu_seqlens": None})) == [[5, 6, 7, 8]]  # a row is a sequence
    assert tokens_of(split_packed(batch | {"loss_mask": None})) == [[5, 6, 7], [8, *[PAD] * 5]]
    # Another token id, or a token with a loss, ends the tail.
    batch["tokens"][0, 5] = 4
    assert tokens_of(split_packed(batch)) == [[5, 6, 7], [8, PAD, 4]]
    batch["loss_mask"][0, 7] = 0.5
    assert tokens_of(split_packed(batch)) == [[5, 6, 7], [8, PAD, 4, PAD, PAD]]
    # One token stays of a sequence that is all tail.
    batch = batch | {"tokens": torch.full((1, 9), PAD), "loss_mask": torch.zeros(1, 9)}
    assert tokens_of(split_packed(batch)) == [[PAD], [PAD]]


def test_cu_seqlens_padded_says_where_sequences_start():
    batch = {
        "tokens": torch.tensor([[1, 2, 3, 0, 4, 5, 0, 0], [1, 2, 3, 4, 5, 6, 7, 8]]),
        "loss_mask": torch.tensor([[1, 1, 1, 0, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1, 1, 1]]).float(),
        # The right padding of cu_seqlens is the row's length, which here is no end of a sequence.
        "cu_seqlens": torch.tensor([[0, 3, 5, 8], [0, 8, 8, 8]], dtype=torch.int32),
        "cu_seqlens_padded": torch.tensor([[0, 4, 8, 8], [0, 8, 8, 8]], dtype=torch.int32),
    }
    assert tokens_of(split_packed(batch)) == [[1, 2, 3], [4, 5], [1, 2, 3, 4, 5, 6, 7, 8]]


def starts(*values):
    return torch.tensor([values], dtype=torch.int32)


def bridge_batch(**keys):
    """Sequences of 3 and 4 tokens, padded to 4 each, and padding of the row."""
    tokens = torch.tensor([[1, 2, 3, 0, 4, 5, 6, 7, 0, 0]])
    return {"tokens": tokens, "loss_mask": (tokens != 0).float(), "attention_mask": None, "token_count": [10], **keys}


@pytest.mark.parametrize(
    ("lengths", "keys"),
    [
        pytest.param(
            [3, 4],
            {"cu_seqlens_q": starts(0, 3, 7, 7), "cu_seqlens_q_padded": starts(0, 4, 8, 10), "max_seqlen_q": starts(4)},
            id="padded",
        ),
        pytest.param(
            [3, 4],
            {"cu_seqlens_q": starts(0, 3, 7)[0], "cu_seqlens_q_padded": starts(0, 4, 8)[0], "total_tokens": 10},
            id="one-row",
        ),
        # Bridge ends the last sequence at the end of the row; its padding is stripped, and one token stays.
        pytest.param(
            [3, 4, 1], {name: starts(0, 4, 8, 10) for name in ("cu_seqlens_q", "cu_seqlens_kv")}, id="unpadded"
        ),
    ],
)
def test_sequences_of_megatron_bridge_are_found(lengths, keys):
    assert split_packed(with_cu_seqlens(bridge_batch(**keys))).lengths.tolist() == lengths


def test_cross_attention_is_refused():
    with pytest.raises(BalanceError, match="cu_seqlens_q and cu_seqlens_kv differ"):
        with_cu_seqlens(bridge_batch(cu_seqlens_q=starts(0, 4, 8), cu_seqlens_kv=starts(0, 2, 8)))


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
