"""Draws lengths from named distributions, to try a plan without the data.

Each is a mixture of lognormal distributions cut to an interval, fitted to the lengths of a public data
set. `fit_distance` is the Kolmogorov-Smirnov distance between the fit and the set: the largest gap
between the two cumulative distributions. Draws are seeded, and a longer draw starts with the shorter.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass

import numpy as np
from numpy.typing import NDArray

from megatron_balance.errors import BalanceError

_BLOCK = 4096
"""Candidates drawn at a time: fixed, so that the first samples do not depend on num_samples."""


@dataclass(frozen=True)
class LengthMixture:
    """A mixture of lognormals, cut to `[shortest, longest]` tokens.

    Attributes:
        components: share, mean and standard deviation of the logarithm of the length, of each lognormal.
        shortest: no length is below, tokens.
        longest: no length is above, tokens.
        fit_distance: Kolmogorov-Smirnov distance to the real set.
    """

    components: tuple[tuple[float, float, float], ...]
    _: KW_ONLY
    shortest: int
    longest: int
    fit_distance: float


# Fitted to the lengths of public data, counted in cl100k_base tokens or in tokens as the service published
# them. Only the fit is kept here, none of the data.
SYNTHETIC_LENGTHS: dict[str, LengthMixture] = {
    # chat answers to the AlpacaEval instructions, with the instruction (tatsu-lab/alpaca_eval)
    "alpaca_eval": LengthMixture(
        ((0.5034, 5.1894, 0.8587), (0.4966, 6.0856, 0.3849)), shortest=5, longest=4892, fit_distance=0.0112
    ),
    # requests of a conversation service, context and answer (Azure/AzurePublicDataset, LLM trace 2023)
    "azure_conv": LengthMixture(
        ((0.4212, 6.0737, 0.3820), (0.3518, 7.3055, 0.0518), (0.2270, 7.8456, 0.4825)),
        shortest=64,
        longest=14089,
        fit_distance=0.068,
    ),
    # source files of twelve public repositories, one file a sample
    "code_files": LengthMixture(((1.0, 6.9607, 1.2552),), shortest=44, longest=236011, fit_distance=0.0152),
    # GSM8K training questions with their answers (openai/grade-school-math)
    "gsm8k_sft": LengthMixture(((1.0, 4.9967, 0.3540),), shortest=51, longest=458, fit_distance=0.0205),
    # requests of the Mooncake synthetic trace, input and output (kvcache-ai/Mooncake, FAST25 release)
    "mooncake_synthetic": LengthMixture(
        ((0.5065, 10.0687, 0.5148), (0.4935, 6.7629, 1.6125)), shortest=20, longest=191386, fit_distance=0.0439
    ),
    # answers of eleven models to Reasoning Gym tasks, with the question (open-thought/reasoning-gym-eval)
    "reasoning_gym": LengthMixture(
        ((0.7463, 5.7043, 0.9409), (0.1626, 6.8335, 1.3534), (0.0911, 3.6238, 0.3732)),
        shortest=14,
        longest=35892,
        fit_distance=0.0123,
    ),
    # production requests to a general language model, m-large (alibaba/ServeGen)
    "servegen_mlarge": LengthMixture(
        ((0.7087, 6.8616, 0.8329), (0.2056, 6.3957, 0.1003), (0.0857, 4.3530, 0.1238)),
        shortest=20,
        longest=25687,
        fit_distance=0.0343,
    ),
    # whole multi-turn agent trajectories of the airline task (sierra-research/tau-bench)
    "tau_airline": LengthMixture(
        ((0.6877, 8.3664, 0.3579), (0.3123, 7.5901, 0.1401)), shortest=1470, longest=10870, fit_distance=0.0257
    ),
}


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

    Example:
        >>> synthetic_lengths("gsm8k_sft", num_samples=1000).size
        1000
    """
    mixture = SYNTHETIC_LENGTHS.get(name)
    if mixture is None:
        raise BalanceError(f"No synthetic lengths are named {name!r}; there are {', '.join(SYNTHETIC_LENGTHS)}.")
    if isinstance(num_samples, bool) or num_samples < 1:
        raise BalanceError(f"num_samples is {num_samples!r}: it must be an integer of at least 1.")
    if isinstance(seed, bool) or seed < 0:
        raise BalanceError(f"seed is {seed!r}: it must be an integer of 0 or more.")
    generator = np.random.default_rng(seed)
    weights, mu, sigma = np.array(mixture.components).T
    upper = np.cumsum(weights)
    blocks = [np.zeros(0, dtype=np.int64)]
    while sum(block.size for block in blocks) < num_samples:
        # Scaled by the last edge: the weights are rounded and need not add to one.
        position = generator.random(_BLOCK) * upper[-1]
        component = (position[:, None] >= upper[:-1]).sum(axis=1)
        logarithm = mu[component] + sigma[component] * generator.standard_normal(_BLOCK)
        lengths = np.rint(np.exp(logarithm)).astype(np.int64)
        # Redrawn rather than clipped: clipping would pile samples up on the two edges.
        blocks.append(lengths[(lengths >= mixture.shortest) & (lengths <= mixture.longest)])
    return np.concatenate(blocks)[:num_samples]
