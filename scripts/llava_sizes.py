"""Sizes of the model that train_llava_loop.py trains, and of its samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

VOCAB_SIZE, IMAGE_TOKEN = 102, 101
PATCH = 4
"""Pixels of a patch's side."""


@dataclass(frozen=True)
class Sizes:
    """Sizes of the model: of the language model, of the encoder, and of a tile in pixels a side.

    With pixel_shuffle four patches become one embedding.
    """

    num_layers: int = 2
    hidden_size: int = 32
    vision_layers: int = 2
    vision_hidden_size: int = 16
    tile: int = 12
    pixel_shuffle: bool = False

    @property
    def tokens_per_tile(self) -> int:
        """Embeddings of a tile: its patches, without the class token."""
        return (self.tile // PATCH) ** 2 // (4 if self.pixel_shuffle else 1)


@dataclass(frozen=True)
class Text:
    """A sample before its numbers are drawn: tokens of text, and the tiles of each image."""

    num_tokens: int
    num_tiles: Sequence[int] = ()
