"""Image tokens as the language model runs them, and as LLaVAModel takes them.

megatron.core's LLaVAModel takes one token for each image and puts the image's embeddings in its place,
`tokens_per_tile` for each of its tiles (`_preprocess_data` in megatron/core/models/multimodal/llava_model.py). Lengths,
costs and `cu_seqlens` count what the language model runs, so samples hold the image's token once for each embedding:
the data set expands it, and the forward step collapses it again.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from megatron_balance.errors import BalanceError

_PER_TOKEN = ("tokens", "labels", "loss_mask", "position_ids")


def expand_image_tokens(
    row: Mapping[str, Tensor], *, num_image_tiles: Tensor, image_token: int, tokens_per_tile: int
) -> dict[str, Tensor]:
    """A sequence with as many image tokens as its images have embeddings.

    As in LLaVAModel, neither an image's embeddings nor the token before it have a loss.

    Args:
        row: `tokens`, `labels` and `loss_mask`, each `[num_tokens]`, with one token for each image.
        num_image_tiles: integers `[num_images]`.
        image_token: id of the token that stands for an image.
        tokens_per_tile: embeddings of a tile (`LLaVAModel.img_seq_len`).

    Returns:
        The same keys `[num_expanded_tokens]`, and `position_ids`.

    Raises:
        BalanceError: there is not one token for each image.
    """
    is_image = row["tokens"] == image_token
    if int(is_image.sum()) != len(num_image_tiles):
        raise BalanceError(
            f"tokens has {int(is_image.sum())} times the image token {image_token}: num_image_tiles must have one "
            f"entry for each, and has {len(num_image_tiles)}."
        )
    repeats = torch.ones_like(row["tokens"])
    repeats[is_image] = num_image_tiles.to(repeats) * tokens_per_tile
    masked = is_image.clone()
    masked[:-1] |= is_image[1:]
    per_token = {**row, "loss_mask": row["loss_mask"].masked_fill(masked, 0)}
    expanded = {name: per_token[name].repeat_interleave(repeats) for name in ("tokens", "labels", "loss_mask")}
    return expanded | {"position_ids": torch.arange(len(expanded["tokens"]))}


def collapse_image_tokens(batch: Mapping[str, Tensor], *, image_token: int, tokens_per_tile: int) -> dict[str, Tensor]:
    """The arguments of LLaVAModel's text in a micro-batch whose image tokens are expanded.

    The model's loss has one entry for each expanded token: multiply it with the micro-batch's own `loss_mask`.

    Args:
        batch: `tokens`, `labels`, `loss_mask` and `position_ids`, each `[1, num_tokens]`; `num_image_tiles`
            `[num_images]`; `cu_seqlens` `[1, num_sequences + 1]`.
        image_token: as it was expanded.
        tokens_per_tile: as it was expanded.

    Returns:
        tokens, labels, loss_mask and position_ids, `[1, num_collapsed_tokens]`: of each image its last token.

    Raises:
        BalanceError: image tokens and tiles do not match, or a sequence begins with an image: LLaVAModel would drop
            the label before it, that of another sequence.
    """
    is_image = batch["tokens"][0] == image_token
    places = is_image.nonzero().flatten()
    ends = torch.cumsum(batch["num_image_tiles"].to(places) * tokens_per_tile, dim=0)
    if (int(ends[-1]) if len(ends) else 0) != len(places):
        raise BalanceError(
            f"tokens has {len(places)} times the image token {image_token}, and num_image_tiles "
            f"{batch['num_image_tiles'].tolist()} with {tokens_per_tile} a tile needs as many: expand the tokens of "
            "samples first (expand_image_tokens)."
        )
    starts = batch["cu_seqlens"][0, 1:-1].long()
    if is_image[starts].any():
        raise BalanceError(
            f"A sequence begins with the image token {image_token}: LLaVAModel drops the label before an image, here "
            "that of another sequence. Begin sequences with a token of text."
        )
    kept = ~is_image
    kept[places[ends - 1]] = True
    return {name: batch[name][:, kept] for name in _PER_TOKEN}
