"""Draws lengths from named distributions, to try a plan without the data.

Each is a mixture of lognormal distributions cut to an interval, fitted to the lengths of a public data set, which
synthetic.json names; lengths are in cl100k_base tokens, or in tokens as the service published them. Only the fit is
kept, none of the data.
"""

from __future__ import annotations

import json
from importlib.resources import files
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_balance.errors import BalanceError, check_integer
from megatron_balance.lengths.read import MAX_LENGTHS

_BLOCK = 4096
"""Candidates drawn at a time: fixed, so that the first samples do not depend on num_samples."""

SYNTHETIC_LENGTHS: dict[str, dict[str, Any]] = json.loads(
    (files(__package__) / "synthetic.json").read_text(encoding="utf-8")
)
"""By name a mixture of lognormals, cut to `[shortest, longest]` tokens.

`of` is the data set, `components` are share, mean and standard deviation of the logarithm of the length, and
`fit_distance` is the Kolmogorov-Smirnov distance to the set: the largest gap between the cumulative distributions.
"""


def synthetic_lengths(name: str, *, num_samples: int, seed: int = 0) -> NDArray[np.int64]:
    """Draw lengths from a named distribution.

    Args:
        name: a key of `SYNTHETIC_LENGTHS`.
        num_samples: how many.
        seed: the same seed gives the same lengths, and a longer draw starts with the shorter one.

    Returns:
        `[num_samples]` int64, tokens.

    Raises:
        BalanceError: the name is unknown, or num_samples or seed cannot be used.

    Examples:
        >>> synthetic_lengths("gsm8k_sft", num_samples=1000).size
        1000
    """
    mixture = SYNTHETIC_LENGTHS.get(name)
    if mixture is None:
        raise BalanceError(f"No synthetic lengths are named {name!r}; there are {', '.join(SYNTHETIC_LENGTHS)}.")
    num_samples, seed = check_integer("num_samples", num_samples), check_integer("seed", seed, least=0)
    generator = np.random.default_rng(seed)
    weights, mu, sigma = np.array(mixture["components"]).T
    upper = np.cumsum(weights)
    if num_samples > MAX_LENGTHS:
        raise BalanceError(f"num_samples is {num_samples}: at most {MAX_LENGTHS} are drawn.")
    blocks, drawn = [np.zeros(0, dtype=np.int64)], 0
    while drawn < num_samples:
        # Scaled by the last edge: the weights are rounded and need not add to one.
        position = generator.random(_BLOCK) * upper[-1]
        component = (position[:, None] >= upper[:-1]).sum(axis=1)
        logarithm = mu[component] + sigma[component] * generator.standard_normal(_BLOCK)
        lengths = np.rint(np.exp(logarithm)).astype(np.int64)
        # Redrawn rather than clipped: clipping would pile samples up on the two edges.
        blocks.append(lengths[(lengths >= mixture["shortest"]) & (lengths <= mixture["longest"])])
        drawn += blocks[-1].size
    return np.concatenate(blocks)[:num_samples]
