"""An endless data set whose lengths change from row to row and drift over a run."""

from __future__ import annotations

from typing import Any

import numpy as np
from sft_dataset import SftDataset, SftSample

from benchmarks.soak import GLOBAL_BATCH_SIZE, STEPS_PER_SWING

MEDIAN_TOKENS = 96
SPREAD = 0.9
"""Standard deviation of the logarithm of a length."""

SWING = 2.0
"""The median of the lengths goes up and down by this factor."""

ROWS_PER_SWING = STEPS_PER_SWING * GLOBAL_BATCH_SIZE

NUM_TOKENS = 256


class DriftingRows(SftDataset):
    """Random tokens, made when they are asked for; a row depends on the seed and its index alone."""

    def __init__(self, *, num_samples: int, seq_length: int, seed: int) -> None:
        whole_row = SftSample(np.zeros(2, dtype=np.int64), np.ones(2, dtype=bool))
        super().__init__(
            [whole_row],
            num_samples=num_samples,
            seq_length=seq_length,
            pad_to_seq_length=False,
            pad_token=0,
            seed=seed,
        )

    def sample(self, index: int) -> SftSample:
        """The sample that row `index` shows."""
        random = np.random.default_rng([self.seed, index])
        median = MEDIAN_TOKENS * SWING ** np.sin(2 * np.pi * index / ROWS_PER_SWING)
        length = int(np.clip(random.lognormal(np.log(median), SPREAD), 4, self.seq_length))
        tokens = random.integers(NUM_TOKENS, size=length + 1)
        return SftSample(tokens.astype(np.int64), np.ones(length + 1, dtype=bool))


def datasets_provider(num_samples: list[int], vp_stage: int | None = None) -> tuple[DriftingRows, None, None]:
    """Train set only; stands in for `pretrain_sft.datasets_provider`."""
    from megatron.training import get_args

    args: Any = get_args()
    return DriftingRows(num_samples=num_samples[0], seq_length=args.seq_length, seed=args.seed), None, None
