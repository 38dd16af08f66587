"""Batches of a data loader, Megatron's or Megatron-Bridge's → samples: packed rows, padded rows, rows with images."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sample_rows import Sample, rows_of, samples_of, schema_of

from megatron_balance import BalanceError
from megatron_balance.runtime.gather import image_patches
from megatron_balance.samples.packing import pack_microbatch, with_attention_keys
from megatron_balance.samples.sample import Samples, SampleSchema
from megatron_balance.samples.unpacking import split_packed, with_cu_seqlens, with_row_lengths

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
        (set_value("cu_seqlens", (1, 0), 1), "Row 1: cu_seqlens is .* must begin at 0"),
        (set_value("cu_seqlens", (1, 2), 1), "Row 1: cu_seqlens is .* not fall"),
        (set_value("cu_seqlens", (0, -1), 9), "Row 0: cu_seqlens is .* end in the row's 6"),
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
        (lambda batch: batch["cu_seqlens"][1].clamp_(max=3), "1 tokens with loss_mask lie outside"),
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


# Padded rows ----------------------------------------------------------------------------------------------------------

FILLER, WIDTH, END = 9, 6, 7
ATTENTION_MASK = "attention_mask"

MASKS = ("none", "marked", "marked_bool")


def padded(rows, *, mask="none", width=WIDTH):
    """Rows of tokens; each is to predict its next token, and END after the last."""
    tokens = torch.tensor([[*row, *[FILLER] * (width - len(row))] for row in rows])
    labels = torch.tensor([[*[*row, END][1:], *[FILLER] * (width - len(row))] for row in rows])
    real = torch.tensor([[place < len(row) for place in range(width)] for row in rows])
    batch = {"tokens": tokens, "labels": labels, "loss_mask": real.float(), "position_ids": torch.arange(width)}
    batch["position_ids"] = batch["position_ids"].expand(len(rows), -1)
    return batch | {ATTENTION_MASK: {"none": None, "marked": real.long(), "marked_bool": real}[mask]}


@given(
    st.lists(st.lists(st.integers(0, 8), min_size=1, max_size=WIDTH), min_size=1, max_size=4),
    st.sampled_from(MASKS),
    st.integers(0, 3),
)
def test_every_row_becomes_a_sample_of_its_length(rows, mask, spare):
    batch = padded(rows, mask=mask, width=WIDTH + spare)
    sources = [FILLER] + [ATTENTION_MASK] * (mask != "none")
    for padding in sources:
        samples = split_packed(with_row_lengths(batch, padding=padding))
        assert [tokens.tolist() for tokens in samples.columns["tokens"]] == rows
        assert [labels.tolist() for labels in samples.columns["labels"]] == [[*row[1:], END] for row in rows]
        assert all(mask.all() for mask in samples.columns["loss_mask"])
        assert ATTENTION_MASK not in samples.columns


def test_what_looks_like_padding_stays_where_it_is_learned_or_followed_and_one_token_always():
    full = padded([[1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 6]], mask="marked")
    assert with_row_lengths(full, padding=ATTENTION_MASK)["cu_seqlens"].tolist() == [[0, WIDTH], [0, WIDTH]]
    batch = padded([[FILLER, FILLER, 2, 3], [FILLER]])
    batch["loss_mask"][1] = 0
    assert with_row_lengths(batch, padding=FILLER)["cu_seqlens"].tolist() == [[0, 4], [0, 1]]
    batch["loss_mask"][0, 4] = 1
    assert with_row_lengths(batch, padding=FILLER)["cu_seqlens"].tolist() == [[0, 5], [0, 1]]


def changed(batch, name, place, value):
    batch[name][place] = value
    return batch


OF_QUERIES = padded([[1, 2, 3, 4]]) | {ATTENTION_MASK: torch.ones(1, 1, WIDTH, WIDTH).triu(1).bool()}
FRONT_MARKED = changed(padded([[1, 2, 3]], mask="marked"), ATTENTION_MASK, (0, 0), 0)
LOSS_ON_PADDING = changed(padded([[1, 2], [1, 2, 3]], mask="marked"), "loss_mask", (1, 4), 1)


@pytest.mark.parametrize(
    ("batch", "padding", "message"),
    [
        (FRONT_MARKED, ATTENTION_MASK, "Row 0: attention_mask has padding before its last real token"),
        (LOSS_ON_PADDING, ATTENTION_MASK, "1 tokens with loss_mask lie outside every sequence"),
        (OF_QUERIES, FILLER, "may keep documents of a row apart"),
        (OF_QUERIES, ATTENTION_MASK, "may keep documents of a row apart"),
        (padded([[1]]), ATTENTION_MASK, "--balance-unpad is attention_mask, and the data has none"),
        (padded([[1]]) | {ATTENTION_MASK: torch.ones(1, 2)}, ATTENTION_MASK, r"attention_mask has shape \[1, 2\]"),
        ({**padded([[1]]), "loss_mask": None}, FILLER, "rows are padded and have no loss_mask"),
    ],
)
def test_what_is_no_padding_at_the_end_is_refused(batch, padding, message):
    with pytest.raises(BalanceError, match=message):
        split_packed(with_row_lengths(batch, padding=padding))


# Keys of other lengths, as of images ----------------------------------------------------------------------------------


def with_patches(length, image_patches, first=1):
    tokens = torch.arange(first, first + length)
    return Sample(
        {"tokens": tokens, "loss_mask": torch.ones(length), "position_ids": tokens - first},
        ragged={
            "pixel_values": torch.arange(sum(image_patches) * 3.0).view(-1, 3) + 100 * first,
            "image_grid_thw": torch.tensor([[1, 1, n] for n in image_patches], dtype=torch.int64).view(-1, 3),
        },
    )


def test_packs_have_images_in_the_order_of_samples():
    samples = [with_patches(4, [2, 3]), with_patches(2, [], 10), with_patches(5, [4], 20)]
    batch = pack_microbatch(samples_of(samples), token_multiple=4, cp_size=2)
    assert torch.equal(batch["pixel_values"], torch.cat([one.ragged["pixel_values"] for one in samples]))
    assert batch["image_grid_thw"].tolist() == [[1, 1, 2], [1, 1, 3], [1, 1, 4]]
    assert batch["image_grid_thw_lengths"].tolist() == [2, 0, 1]
    assert batch["pixel_values_lengths"].tolist() == [5, 0, 4]
    for one, again in zip(samples, rows_of(split_packed(batch)), strict=True):
        assert schema_of(one) == schema_of(again)
        for name, tensor in one.tensors.items():
            assert torch.equal(again.tensors[name], tensor), name


def image_rows(**changes):
    """Two rows: sequences of 3 and 2 tokens, and one of 4; four images, of 2, 1, 1 and 3 patches."""
    batch = {
        "tokens": torch.arange(1, 13).view(2, 6),
        "loss_mask": torch.tensor([[1.0] * 5 + [0], [1.0] * 4 + [0, 0]]),
        "cu_seqlens": torch.tensor([[0, 3, 5], [0, 4, 4]]),
        "pixel_values": torch.arange(7.0)[:, None],
        "pixel_values_lengths": torch.tensor([3, 1, 3]),
        "image_grid_thw": torch.arange(12).view(4, 3),
        "image_grid_thw_lengths": torch.tensor([2, 1, 1]),
    }
    return batch | changes


def test_rows_say_how_many_entries_each_sequence_has():
    samples = rows_of(split_packed(image_rows()))
    assert [one.ragged["pixel_values"].flatten().tolist() for one in samples] == [[0, 1, 2], [3], [4, 5, 6]]
    assert [len(one.ragged["image_grid_thw"]) for one in samples] == [2, 1, 1]


def test_masked_tokens_at_the_end_stay_where_images_may_stand_there():
    masked = image_rows(
        loss_mask=torch.tensor([[1.0, 1, 1, 0, 0, 0], [1.0, 0, 0, 0, 0, 0]]), tokens=torch.ones(2, 6).long()
    )
    assert [one.length for one in rows_of(split_packed(masked))] == [3, 2, 4]
    plain = {name: tensor for name, tensor in masked.items() if "image" not in name and "pixel" not in name}
    assert [one.length for one in rows_of(split_packed(plain))] == [3, 1, 1]


@pytest.mark.parametrize(
    ("changes", "phrase"),
    [
        # One count a row.
        (
            {"pixel_values_lengths": torch.tensor([4, 3])},
            r"pixel_values_lengths is torch.int64 \[2\]: it must be integers, \[3\], one a sequence",
        ),
        (
            {"pixel_values_lengths": torch.tensor([3, 1, 2])},
            r"\[3, 1, 2\]: it must be .* the 7 entries of pixel_values",
        ),
        ({"pixel_values_lengths": torch.tensor([8, -4, 3])}, "must be 0 or more"),
        ({"pixel_values_lengths": torch.ones(3)}, "must be integers"),
        ({"audio": torch.zeros(9, 2)}, "audio has shape .* have its entries counted by audio_lengths"),
    ],
)
def test_rows_that_cannot_be_split_are_refused_by_name(changes, phrase):
    with pytest.raises(BalanceError, match=phrase):
        split_packed(image_rows(**changes))


def with_ragged(**ragged):
    return Sample({"tokens": torch.zeros(2)}, ragged=ragged)


def test_a_grid_counts_each_frame_as_an_image():
    samples = [
        with_ragged(image_grid_thw=torch.tensor(images).view(-1, 3), video_grid_thw=torch.tensor(frames).view(-1, 3))
        for images, frames in (([1, 4, 6, 1, 2, 2], [3, 2, 5]), ([], []), ([1, 4, 6], []))
    ]
    expected = [[24 + 4 + 3 * 10, 24**2 + 4**2 + 3 * 10**2], [0, 0], [24, 24**2]]
    assert image_patches(samples_of(samples)).tolist() == expected


@pytest.mark.parametrize(
    ("ragged", "phrase"),
    [
        ({"image_grid_thw": torch.zeros(1, 2)}, r"grids are float32 of shape \[1, 2\]: they must be"),
        ({"image_grid_thw": torch.tensor([[1, 4, 6], [1, -4, 6]])}, "integers of at least 0"),
        ({"pixel_values": torch.zeros(4, 48)}, "pixel_values come without image_grid_thw or video_grid_thw"),
    ],
)
def test_patches_that_cannot_be_counted(ragged, phrase):
    with pytest.raises(BalanceError, match=phrase):
        image_patches(samples_of([with_ragged(**ragged)]))


# Schemas --------------------------------------------------------------------------------------------------------------


def test_items_share_a_schema_or_say_why_not():
    first = Sample({"tokens": torch.arange(3)}, per_sample={"id": torch.tensor(7)}, ragged={"grids": torch.zeros(2, 3)})
    same = Sample({"tokens": torch.arange(5)}, per_sample=first.per_sample, ragged={"grids": torch.zeros(0, 3)})
    parts = [samples_of([]), samples_of([first]), samples_of([same])]
    assert Samples.joined(parts).schema == schema_of(first) == SampleSchema.from_text(schema_of(first).to_text())
    assert Samples.joined([]).schema is None
    for other, phrase in (
        (Sample(first.per_token, ragged=first.ragged), "'id' is missing"),
        (Sample({**first.per_token, "more": torch.ones(3)}, first.per_sample, first.ragged), "no such key"),
        (Sample({"tokens": torch.ones(3)}, first.per_sample, first.ragged), "'tokens' is float32 .* has int64"),
        (Sample(first.per_token, {**first.per_sample, **first.ragged}), r"\[2, 3\] where .* \[num_entries, 3\]"),
    ):
        with pytest.raises(BalanceError, match=f"Item 2 differs from item 1.*{phrase}"):
            Samples.joined([*parts[:2], samples_of([other])])


def test_a_peer_cannot_name_another_object_of_torch():
    with pytest.raises(BalanceError, match="'Tensor'"):
        SampleSchema.from_text('[["tokens","Tensor",[],"per_token"]]')
