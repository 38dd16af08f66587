"""Ragged keys of samples: checked, laid out, packed in order and split again."""

from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_balance import BalanceError
from megatron_balance.runtime import image_patches
from megatron_balance.samples import (
    Sample,
    SampleSchema,
    pack_microbatch,
    split_packed,
)


def sample(length: int, image_patches: list[int], first: int = 1) -> Sample:
    return Sample(
        {
            "tokens": torch.arange(first, first + length),
            "loss_mask": torch.ones(length),
            "position_ids": torch.arange(length),
        },
        ragged={
            "pixel_values": torch.arange(sum(image_patches) * 3.0).view(-1, 3) + 100 * first,
            "image_grid_thw": torch.tensor([[1, 1, n] for n in image_patches], dtype=torch.int64).view(-1, 3),
        },
    )


SAMPLES = [sample(4, [2, 3]), sample(2, [], 10), sample(5, [4], 20)]


def tensors_of(one: Sample) -> dict[str, Tensor]:
    return {**one.per_token, **one.ragged}


def assert_same(these: list[Sample], those: list[Sample]) -> None:
    for one, two in zip(these, those, strict=True):
        assert tensors_of(one).keys() == tensors_of(two).keys()
        for name, tensor in tensors_of(one).items():
            assert torch.equal(tensor, tensors_of(two)[name]), name
            assert tensor.dtype == tensors_of(two)[name].dtype


def test_the_schema_leaves_out_the_number_of_entries() -> None:
    schema = SampleSchema.of(SAMPLES[0])
    assert all(schema == SampleSchema.of(one) for one in SAMPLES)
    assert schema == SampleSchema.from_bytes(schema.to_bytes())
    assert [key.name for key in schema.keys] == [
        "loss_mask",
        "position_ids",
        "tokens",
        "image_grid_thw",
        "pixel_values",
    ]
    assert SAMPLES[0].ragged_lengths == (2, 5)
    per_sample = Sample(SAMPLES[1].per_token, per_sample=SAMPLES[1].ragged)
    differences = list(SampleSchema.of(per_sample).differences(schema))
    assert differences[0] == ("'image_grid_thw' is int64 [0, 3] where the other has int64 [num_entries, 3]")


@pytest.mark.parametrize(
    ("ragged", "length", "phrase"),
    [
        ({"audio": torch.tensor(1)}, 2, "'audio' is 0-d"),
        ({"tokens": torch.zeros(1)}, 2, r"\['tokens'\] are in two of"),
        ({"audio": torch.zeros(1)}, 2, r"\['audio_lengths'\] are in two of .* or named as the lengths"),
        ({"sound": torch.zeros(3)}, 0, r"has \(3,\) entries and the sample no token"),
    ],
)
def test_what_a_sample_cannot_carry(ragged: dict[str, Tensor], length: int, phrase: str) -> None:
    with pytest.raises(BalanceError, match=phrase):
        Sample({"tokens": torch.zeros(length)}, per_sample={"audio_lengths": torch.zeros(())}, ragged=ragged)


def test_packs_have_images_in_the_order_of_samples() -> None:
    batch = pack_microbatch(SAMPLES, token_multiple=4, cp_size=2)
    assert torch.equal(batch["pixel_values"], torch.cat([one.ragged["pixel_values"] for one in SAMPLES]))
    assert batch["image_grid_thw"].tolist() == [[1, 1, 2], [1, 1, 3], [1, 1, 4]]
    assert batch["image_grid_thw_lengths"].tolist() == [2, 0, 1]
    assert batch["pixel_values_lengths"].tolist() == [5, 0, 4]
    assert_same(split_packed(batch), SAMPLES)


def test_a_pack_without_an_image_and_a_dummy_have_the_keys() -> None:
    schema = SampleSchema.of(SAMPLES[0])
    for batch in (pack_microbatch([SAMPLES[1]]), pack_microbatch([], schema=schema, token_multiple=2)):
        assert batch["pixel_values"].shape == (0, 3)
        assert batch["image_grid_thw"].dtype == torch.int64
        assert batch["pixel_values_lengths"].tolist() == [0]


def rows(**changes: Any) -> dict[str, Tensor]:
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


def test_rows_say_how_many_entries_each_sequence_has() -> None:
    found = [one.ragged["pixel_values"].flatten().tolist() for one in split_packed(rows())]
    assert found == [[0, 1, 2], [3], [4, 5, 6]]
    assert [len(one.ragged["image_grid_thw"]) for one in split_packed(rows())] == [2, 1, 1]


def test_masked_tokens_at_the_end_stay_where_images_may_stand_there() -> None:
    masked = rows(loss_mask=torch.tensor([[1.0, 1, 1, 0, 0, 0], [1.0, 0, 0, 0, 0, 0]]), tokens=torch.ones(2, 6).long())
    assert [one.length for one in split_packed(masked)] == [3, 2, 4]
    plain = {name: tensor for name, tensor in masked.items() if "image" not in name and "pixel" not in name}
    assert [one.length for one in split_packed(plain)] == [3, 1, 1]


def test_whole_rows_keep_the_images_of_their_sequences() -> None:
    of_rows = rows(pixel_values_lengths=torch.tensor([4, 3]), image_grid_thw_lengths=torch.tensor([3, 1]))
    samples = split_packed(of_rows, unit="sample")
    assert [one.ragged["pixel_values"].flatten().tolist() for one in samples] == [[0, 1, 2, 3], [4, 5, 6]]
    assert [one.segment_lengths for one in samples] == [(3, 2), (4,)]
    with pytest.raises(BalanceError, match=r"_lengths is torch.int64 \[3\]: .*\[2\], one a row under"):
        split_packed(rows(), unit="sample")


@pytest.mark.parametrize(
    ("changes", "phrase"),
    [
        (
            {"pixel_values_lengths": torch.tensor([4, 3])},
            r"pixel_values_lengths is .*\[3\], one a sequence under --balance-unit segment",
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
def test_rows_that_cannot_be_split_are_refused_by_name(changes: dict[str, Tensor], phrase: str) -> None:
    with pytest.raises(BalanceError, match=phrase):
        split_packed(rows(**changes))


def test_images_of_a_row_without_a_sequence_are_not_lost() -> None:
    empty = {
        "cu_seqlens": torch.tensor([[0, 3, 5], [0, 0, 0]]),
        "loss_mask": torch.tensor([[1.0] * 5 + [0], [0.0] * 6]),
    }
    with pytest.raises(BalanceError, match="Row 1: it has entries of pixel_values and no sequence"):
        split_packed(
            rows(
                **empty,
                pixel_values_lengths=torch.tensor([4, 3]),
                image_grid_thw_lengths=torch.tensor([4, 0]),
            ),
            unit="sample",
        )


def with_ragged(**ragged: Tensor) -> Sample:
    return Sample({"tokens": torch.zeros(2)}, ragged=ragged)


def test_a_grid_counts_each_frame_as_an_image() -> None:
    samples = [
        with_ragged(image_grid_thw=torch.tensor([[1, 4, 6], [1, 2, 2]]), video_grid_thw=torch.tensor([[3, 2, 5]])),
        with_ragged(image_grid_thw=torch.zeros(0, 3).long(), video_grid_thw=torch.zeros(0, 3).long()),
        with_ragged(image_grid_thw=torch.tensor([[1, 4, 6]]), video_grid_thw=torch.zeros(0, 3).long()),
    ]
    expected = [[24 + 4 + 3 * 10, 24**2 + 4**2 + 3 * 10**2], [0, 0], [24, 24**2]]
    assert image_patches(samples, patch_values=0).tolist() == expected


@pytest.mark.parametrize(
    ("ragged", "patch_values", "phrase"),
    [
        ({"image_grid_thw": torch.zeros(1, 2)}, 48, r"grids are float32 of shape \[1, 2\]: they must be"),
        ({"image_grid_thw": torch.tensor([[1, 4, 6], [1, -4, 6]])}, 48, "integers of at least 0"),
        (
            {"pixel_values": torch.zeros(4, 48)},
            48,
            r"shape \[48\]: patches are counted from image_grid_thw",
        ),
        (
            {"pixel_values": torch.zeros(4, 3, 8, 8)},
            0,
            "not known: give cost as a ModelShape",
        ),
        (
            {"pixel_values": torch.zeros(4, 3, 8, 9)},
            48,
            r"shape \[3, 8, 9\]: .* multiple of .* \(48\)",
        ),
    ],
)
def test_patches_that_cannot_be_counted(ragged: dict[str, Tensor], patch_values: int, phrase: str) -> None:
    with pytest.raises(BalanceError, match=phrase):
        image_patches([with_ragged(**ragged)], patch_values=patch_values)
