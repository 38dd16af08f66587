"""Reads the images of samples from the file of their lengths: the patches that a vision encoder runs for each.

Like lengths, they keep the order of the file.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

from megatron_balance.errors import BalanceError
from megatron_balance.lengths.parquet import open_parquet
from megatron_balance.lengths.records import MOST_SHOWN, json_lines, listed
from megatron_balance.model.vision import patches_of_grids

MAX_PATCHES = 2**30
"""Most patches of an image that a plan takes."""


def read_image_patches(path: str | Path, *, key: str) -> list[list[int]]:
    """Patches of every image of every sample, in file order.

    Args:
        path: `.jsonl` with an object a line, or `.parquet` (needs pyarrow).
        key: field or column with a sample's images: a list of patches, one number an image; a list of grids
            `[frames, rows, columns]` (`image_grid_thw`); one number for one image; null for none. A line of `.jsonl`
            without the field has none.

    Returns:
        `[num_samples]`, for each sample the patches of each of its images.

    Raises:
        BalanceError: the file is missing or of another kind, no sample has the field, or its value is none of these.
    """
    file = Path(path)
    reader = {".jsonl": _of_jsonl, ".parquet": _of_parquet}.get(file.suffix.lower())
    if reader is None:
        raise BalanceError(f"{file} has no fields for images (--image-key): give a .jsonl or .parquet file.")
    if not file.is_file():
        raise BalanceError(f"{file} is not a file; give a .jsonl or .parquet file of lengths and images.")
    return [_patches(value, where=where) for where, value in reader(file, key)]


def _of_jsonl(file: Path, key: str) -> Iterator[tuple[str, object]]:
    found = False
    names: dict[str, None] = {}
    for number, value, _ in json_lines(file, holds="object"):
        fields = cast("dict[str, object]", value) if isinstance(value, dict) else {}
        found |= key in fields
        names |= dict.fromkeys(fields)
        yield f"{file}, line {number}", fields.get(key)
    if not found:
        raise BalanceError(f"{file} has no field {key!r} (--image-key); it has {listed(list(names))}.")


def _of_parquet(file: Path, key: str) -> Iterator[tuple[str, object]]:
    with open_parquet(file, extra="report") as table:
        names = list(table.schema_arrow.names)
        if key not in names:
            raise BalanceError(f"{file} has no column {key!r} (--image-key); it has {listed(names)}.")
        values: list[object] = table.read(columns=[key]).column(key).to_pylist()
    for row, value in enumerate(values):
        yield f"{file}, column {key!r}, row {row}", value


def _patches(value: object, *, where: str) -> list[int]:
    if value is None:
        return []
    images: list[Any] = cast("list[Any]", value) if isinstance(value, list) else [value]
    if all(_is_count(image) for image in images):
        return images
    if all(isinstance(image, list) and len(cast("list[Any]", image)) == 3 for image in images) and all(
        _is_count(size) for grid in images for size in grid
    ):
        return patches_of_grids(images).tolist()
    shown = str(value)[:MOST_SHOWN]
    raise BalanceError(
        f"{where}: {shown} is no list of images: each is a number of patches from 0 to {MAX_PATCHES}, or a grid "
        "[frames, rows, columns] of patches."
    )


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_PATCHES
