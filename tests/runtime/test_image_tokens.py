"""Image tokens are expanded to what the language model runs, and collapsed to what LLaVAModel takes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron_balance.errors import BalanceError
from megatron_balance.samples.image_tokens import collapse_image_tokens, expand_image_tokens
from megatron_balance.samples.packing import pack_microbatch
from megatron_balance.samples.sample import Sample

IMAGE = 9
ROW = {
    "tokens": torch.tensor([1, 2, IMAGE, 3, IMAGE, IMAGE, 4]),
    "labels": torch.tensor([2, IMAGE, 3, IMAGE, IMAGE, 4, 5]),
    "loss_mask": torch.ones(7),
}


def expanded(row: dict[str, Tensor], tiles: list[int]) -> dict[str, Tensor]:
    return expand_image_tokens(row, num_image_tiles=torch.tensor(tiles), image_token=IMAGE, tokens_per_tile=2)


def packed(*rows: tuple[dict[str, Tensor], list[int]]) -> dict[str, Tensor]:
    samples = [
        Sample(expanded(row, tiles), ragged={"num_image_tiles": torch.tensor(tiles, dtype=torch.int32)})
        for row, tiles in rows
    ]
    return pack_microbatch(samples, token_multiple=4)


def collapsed(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return collapse_image_tokens(batch, image_token=IMAGE, tokens_per_tile=2)


def test_an_image_has_a_token_for_each_embedding_and_none_has_a_loss() -> None:
    row = expanded(ROW, [2, 1, 1])
    assert row["tokens"].tolist() == [1, 2, *[IMAGE] * 4, 3, *[IMAGE] * 4, 4]
    assert row["loss_mask"].tolist() == [1, 0, *[0] * 4, 0, *[0] * 4, 1]
    assert row["labels"].tolist() == [2, IMAGE, 3, 3, 3, 3, IMAGE, IMAGE, IMAGE, 4, 4, 5]
    assert row["position_ids"].tolist() == list(range(12))


def test_a_pack_collapses_to_one_token_for_each_image() -> None:
    text = {"tokens": torch.tensor([5, 6, 7]), "labels": torch.tensor([6, 7, 8]), "loss_mask": torch.ones(3)}
    batch = packed((ROW, [2, 1, 1]), (text, []), (ROW, [1, 3, 1]))
    found = collapsed(batch)
    # 12 and 3 and 14 tokens are padded to 12, 4 and 16; position 11 is the second one's padding.
    row = ROW["tokens"].tolist()
    assert found["tokens"].tolist() == [[*row, 5, 6, 7, 0, *row, 0, 0]]
    assert found["labels"][0, :7].tolist() == ROW["labels"].tolist()
    assert all(tensor.shape == found["tokens"].shape for tensor in found.values())


def test_a_pack_without_an_image_stays() -> None:
    text = {"tokens": torch.tensor([5, 6, 7, 8]), "labels": torch.tensor([6, 7, 8, 9]), "loss_mask": torch.ones(4)}
    batch = packed((text, []))
    assert all(torch.equal(tensor, batch[name]) for name, tensor in collapsed(batch).items())


def test_what_cannot_be_matched_is_refused() -> None:
    with pytest.raises(BalanceError, match=r"tokens has 3 times the image token 9: .* one entry for each, and has 2"):
        expanded(ROW, [1, 1])
    short = packed((ROW, [2, 1, 1]))
    with pytest.raises(BalanceError, match=r"tokens has 8 times the image token 9, and num_image_tiles \[2, 1\]"):
        collapsed(short | {"num_image_tiles": torch.tensor([2, 1])})
    first = {name: tensor[2:] for name, tensor in ROW.items()}
    assert collapsed(packed((first, [1, 1, 1])))["tokens"][0, 0] == IMAGE
    with pytest.raises(BalanceError, match="A sequence begins with the image token 9"):
        collapsed(packed((ROW, [1, 1, 1]), (first, [1, 1, 1])))
