"""The model of the benchmark of LLaVAModel, its samples, and the ways of planning them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from llava_sizes import PATCH, VOCAB_SIZE, Sizes, Text

from benchmarks.planner.images import draw_pictures
from megatron_balance import CostModel, ModelShape
from megatron_balance.cost.model import MICROBATCH_TOKENS
from megatron_balance.lengths.synthetic import synthetic_lengths
from megatron_balance.model.vision import VisionEncoder

SIZES = {"num_layers": 2, "hidden_size": 128, "vision_layers": 2, "vision_hidden_size": 64, "tile": 24}
PIXEL_SHUFFLE = True
SCALE = 28
"""A tile stands for InternVL's of 448 pixels with 256 embeddings; texts are shorter by the same factor, 256/9."""
TILE_PIXELS, MAX_TILES = 448, 12
CAP = 512
MIXTURES = ("llava", "documents", "code and documents")
SAMPLES_PER_RANK = 32


def cost_model() -> CostModel:
    """Costs of the model, both parts."""
    sizes = Sizes(**SIZES, pixel_shuffle=PIXEL_SHUFFLE)
    shape = ModelShape(
        hidden_size=sizes.hidden_size,
        num_layers=sizes.num_layers,
        num_attention_heads=4,
        num_query_groups=4,
        kv_channels=sizes.hidden_size // 4,
        ffn_hidden_size=4 * sizes.hidden_size,
        padded_vocab_size=VOCAB_SIZE,
        gated_linear_unit=False,
        vision=VisionEncoder(
            hidden_size=sizes.vision_hidden_size,
            num_layers=sizes.vision_layers,
            ffn_hidden_size=4 * sizes.vision_hidden_size,
            gated_linear_unit=False,
            patch_values=3 * PATCH**2,
            patches_per_token=4,
            projector_hidden_size=sizes.hidden_size,
        ),
    )
    return CostModel.from_shape(shape, microbatch_tokens=MICROBATCH_TOKENS)


def patches_of_tile() -> int:
    """Patches of a tile."""
    return (SIZES["tile"] // PATCH) ** 2


def texts(dp_rank: int, *, mixture: str) -> Iterator[Text]:
    """The samples that a data-parallel rank loads, step after step."""
    for step in itertools.count():
        seed = 1000 * dp_rank + step
        drawn = draw_pictures("llava" if mixture == "llava" else "documents", num_samples=SAMPLES_PER_RANK, seed=seed)
        files = synthetic_lengths("code_files", num_samples=SAMPLES_PER_RANK, seed=seed).tolist()
        for index, (length, pictures) in enumerate(drawn):
            if mixture == "code and documents" and index % 2:
                yield Text(max(min(files[index], CAP * SCALE) // SCALE, 2))
            else:
                yield Text(max(length // SCALE, 2 + len(pictures)), [num_tiles(*picture) for picture in pictures])


def num_tiles(width: int, height: int) -> int:
    """Tiles of a picture: a grid that covers it, at most MAX_TILES, and the picture itself where there are several."""
    grid = min(-(-width // TILE_PIXELS) * -(-height // TILE_PIXELS), MAX_TILES)
    return grid + (grid > 1)


def ways() -> dict[str, dict[str, Any]]:
    """Arguments of `train_llava_loop.train` of each way."""
    by_tokens = ["--no-balance-by-flops"]
    return {
        "stock": {"balanced": False},
        "packed, not moved": {"flags": [*by_tokens, "--no-balance-data"]},
        "tokens": {"flags": by_tokens},
        "FLOPs of both": {},
    }


def cost_of(sequences: Sequence[Sequence[int]], tiles: Sequence[int]) -> int:
    """Cost of a rank's micro-batches, both parts: `sequences[slot]` lengths, and the tiles of each slot."""
    model = cost_model()
    of_tokens = sum(model(length) for slot in sequences for length in slot)
    return of_tokens + sum(tiles) * model.image_cost(patches_of_tile()) + len(sequences) * model.per_microbatch
