"""Made-up trajectories with everything in them, and a comparison of two."""

import torch

PER_TOKEN = ("input_ids", "attention_mask", "loss_mask", "logprobs", "hidden")
LONGER_THAN_ANY = 101
"""Of a tensor as wide as the mask nobody could tell that its second axis is not tokens."""


def make_trajectory(number, lengths):
    """Rows of these lengths. Padding holds noise, so that what is lost or zeroed shows."""
    generator = torch.Generator().manual_seed(number)
    shape = (len(lengths), max(max(lengths), 1) + 3)
    noise = torch.randn(*shape, generator=generator)
    return {
        "input_ids": torch.randint(0, 1000, shape, generator=generator),
        "attention_mask": torch.arange(shape[1]) < torch.tensor(lengths)[:, None],
        "loss_mask": noise > 0,
        "logprobs": noise.bfloat16(),
        "hidden": torch.randn(*shape, 8, generator=generator),
        "rewards": torch.randn(len(lengths), generator=generator),
        "complex": torch.randn(2 * len(lengths), 3, dtype=torch.complex128, generator=generator)[::2],
        "prompt": torch.randint(0, 9, (len(lengths), LONGER_THAN_ANY), generator=generator),
        "version": torch.tensor(number),
        "multi_modal_input": [{"pixels": torch.full((row + 1, 2), number)} for row in range(len(lengths))],
        "name": f"trajectory {number}",
    }


def random_lengths(rng, *, num_trajectories):
    return [rng.integers(1, 50, size=rng.integers(1, 5)).tolist() for _ in range(num_trajectories)]


def trajectory_digest(trajectory):
    """Of what is in it, without the columns of padding that none of its rows uses."""
    longest = int(trajectory["attention_mask"].sum(1).max())
    return digest({key: value[:, :longest] if key in PER_TOKEN else value for key, value in trajectory.items()})


def row_digests(batch):
    """Of each row without padding; `version` and `name` are a batch's and not a row's."""
    return [
        digest(
            {
                key: value[row, :length] if key in PER_TOKEN else value[row]
                for key, value in batch.items()
                if key not in ("version", "name")
            }
        )
        for row, length in enumerate(batch["attention_mask"].sum(1).tolist())
    ]


def digest(content):
    """Its keys, types, dtypes, shapes and values as one text."""
    if isinstance(content, torch.Tensor):
        return f"{content.dtype} {tuple(content.shape)} {content.tolist()}"
    if isinstance(content, dict):
        return str({key: digest(content[key]) for key in sorted(content)})
    return str([digest(entry) for entry in content]) if isinstance(content, list) else repr(content)
