"""Carries the patches of images to verl's v1 trainers, whose batches are keys into the TransferQueue.

Such a trainer sees a row's tags and not its pixels. The agent loop's worker, which puts rows into the queue with their
pixels, adds the tag.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from megatron_balance.adapters.verl.settings import Settings, while_active
from megatron_balance.hooking.patches import Function
from megatron_balance.planner import Images

TAG = "image_patches"
"""The sum over a row's images of their patches, and of their squared patches."""


def tag_images(stock: Function) -> Function:
    """`async_kv_batch_put` of the TransferQueue: rows that are put with tags and images get one more tag."""
    from megatron_balance.adapters.verl.data_proto import row_images

    def balanced(
        settings: Settings,
        keys: list[str],
        partition_id: str,
        fields: Any = None,
        tags: list[dict[str, Any]] | None = None,
        data_parser: Any = None,
    ) -> Any:
        images = None if fields is None or tags is None else row_images(fields, encoder=settings.encoder)
        if tags is not None and images is not None:
            tags = [{**tag, TAG: sums} for tag, sums in zip(tags, images.sums.tolist(), strict=True)]
        return stock(keys, partition_id, fields, tags, data_parser)

    return while_active(stock, balanced)


def tagged_images(tags: Sequence[dict[str, Any]], *, settings: Settings) -> Images | None:
    """The images of the rows; None where images cost nothing or no row is tagged.

    verl's padding rows carry the tags of the row that they were made from, and no images.
    """
    if settings.encoder is None or not any(TAG in tag for tag in tags):
        return None
    sums = [[0, 0] if tag.get("is_padding") else tag.get(TAG, [0, 0]) for tag in tags]
    return Images(np.array(sums, dtype=np.int64))
