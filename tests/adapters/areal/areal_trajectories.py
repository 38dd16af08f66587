"""Made-up trajectories with everything in them, and a comparison of two."""

import hashlib

import numpy as np
import torch

from megatron_balance.adapters.areal.trajectories import split_rows

HIDDEN = 8
LONGER_THAN_ANY = 101
"""Of a tensor as wide as the mask nobody could tell that its second axis is not tokens."""


def make_trajectory(number: int, lengths, *, padded_seq_len: int | None = None) -> dict:
    """Rows of these lengths. Padding holds noise, so that what is lost or zeroed shows."""
    generator = torch.Generator().manual_seed(number)
    shape = (len(lengths), padded_seq_len or max(max(lengths), 1) + 3)
    noise = torch.randn(*shape, generator=generator)
    return {
        "input_ids": torch.randint(0, 1000, shape, generator=generator),
        "attention_mask": torch.arange(shape[1]) < torch.tensor(lengths)[:, None],
        "loss_mask": noise > 0,
        "logprobs": noise.bfloat16(),
        "hidden": torch.randn(*shape, HIDDEN, generator=generator),
        "rewards": torch.randn(len(lengths), generator=generator),
        "prompt": torch.randint(0, 9, (len(lengths), LONGER_THAN_ANY), generator=generator),
        "version": torch.tensor(number),
        "multi_modal_input": [{"pixels": torch.full((row + 1, 2), number)} for row in range(len(lengths))],
        "name": f"trajectory {number}",
    }


def with_images(trajectory: dict, *, patches: int) -> dict:
    """Each row with one picture of a given number of patches, or with none; keys stay those of every trajectory."""
    grid = torch.tensor([[1, 1, patches]])
    row = {"pixel_values": torch.zeros(patches, 2), "image_grid_thw": grid} if patches else {}
    return {**trajectory, "multi_modal_input": [row] * len(trajectory["attention_mask"])}


def random_lengths(rng: np.random.Generator, *, num_trajectories: int, max_rows: int = 4) -> list[list[int]]:
    return [rng.integers(1, 50, size=rng.integers(1, max_rows + 1)).tolist() for _ in range(num_trajectories)]


def row_digests(batch: dict) -> list[str]:
    """Of each row without padding; `version` and `name` are a batch's and not a row's."""
    return [digest({key: row[key] for key in row.keys() - {"version", "name"}}) for row in split_rows(batch)]


def digest(content: object) -> str:
    """Of keys, types, dtypes, shapes and bits."""
    sha = hashlib.sha256()
    _feed(sha, content)
    return sha.hexdigest()


def _feed(sha, content: object) -> None:
    if isinstance(content, torch.Tensor):
        sha.update(f"{content.dtype} {tuple(content.shape)}".encode())
        sha.update(content.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    elif isinstance(content, dict):
        for key in sorted(content):
            sha.update(key.encode())
            _feed(sha, content[key])
    elif isinstance(content, list):
        sha.update(str(len(content)).encode())
        for entry in content:
            _feed(sha, entry)
    else:
        sha.update(repr(content).encode())
