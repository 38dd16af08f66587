"""Ragged keys of samples, as of images: packed in order, split again, and counted."""

from typing import Any

import pytest
import torch
from sample_rows import Sample, rows_of, samples_of, schema_of
from torch import Tensor

from megatron_balance import BalanceError
from megatron_balance.runtime.gather import image_patches
from megatron_balance.samples.packing import pack_microbatch
from megatron_balance.samples.unpacking import split_packed


def sample(length: int, image_patches: list[int], first: int = 1) -> Sample:
    tokens = torch.arange(first, first + length)
    return Sample(
        {"tokens": tokens, "loss_mask": torch.ones(length), "position_ids": tokens - first},
        ragged={
            "pixel_values": torch.arange(sum(image_patches) * 3.0).view(-1, 3) + 100 * first,
            "image_grid_thw": torch.tensor([[1, 1, n] for n in image_patches], dtype=torch.int64).view(-1, 3),
        },
    )


def test_packs_have_images_in_the_order_of_samples() -> None:
    samples = [sample(4, [2, 3]), sample(2, [], 10), sample(5, [4], 20)]
    batch = pack_microbatch(samples_of(samples), token_multiple=4, cp_size=2)
    assert torch.equal(batch["pixel_values"], torch.cat([one.ragged["pixel_values"] for one in samples]))
    assert batch["image_grid_thw"].tolist() == [[1, 1, 2], [1, 1, 3], [1, 1, 4]]
    assert batch["image_grid_thw_lengths"].tolist() == [2, 0, 1]
    assert batch["pixel_values_lengths"].tolist() == [5, 0, 4]
    for one, again in zip(samples, rows_of(split_packed(batch)), strict=True):
        assert schema_of(one) == schema_of(again)
        for name, tensor in one.tensors.items():
            assert torch.equal(again.tensors[name], tensor), name


def test_a_pack_without_an_image_and_a_dummy_have_the_keys() -> None:
    without_image, dummy = samples_of([sample(2, [])]), samples_of([], schema=schema_of(sample(4, [2])))
    for batch in (pack_microbatch(without_image), pack_microbatch(dummy, token_multiple=2)):
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
    samples = rows_of(split_packed(rows()))
    assert [one.ragged["pixel_values"].flatten().tolist() for one in samples] == [[0, 1, 2], [3], [4, 5, 6]]
    assert [len(one.ragged["image_grid_thw"]) for one in samples] == [2, 1, 1]


def test_masked_tokens_at_the_end_stay_where_images_may_stand_there() -> None:
    masked = rows(loss_mask=torch.tensor([[1.0, 1, 1, 0, 0, 0], [1.0, 0, 0, 0, 0, 0]]), tokens=torch.ones(2, 6).long())
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
def test_rows_that_cannot_be_split_are_refused_by_name(changes: dict[str, Tensor], phrase: str) -> None:
    with pytest.raises(BalanceError, match=phrase):
        split_packed(rows(**changes))


def with_ragged(**ragged: Tensor) -> Sample:
    return Sample({"tokens": torch.zeros(2)}, ragged=ragged)


def test_a_grid_counts_each_frame_as_an_image() -> None:
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
def test_patches_that_cannot_be_counted(ragged: dict[str, Tensor], phrase: str) -> None:
    with pytest.raises(BalanceError, match=phrase):
        image_patches(samples_of([with_ragged(**ragged)]))
