"""Batches of samples of similar lengths: sort into buckets, shuffle within them, shuffle the batches.

For trainers that pad every sample of a micro-batch to its longest, at any micro-batch size: a batch of similar samples
has little padding and no straggler, with nothing to move at run time.

    1. the samples that no whole batch needs are drawn at random and come last
    2. samples are shuffled and then sorted by length, so that equal lengths are in random order
    3. the order is cut into buckets of whole batches; each bucket is shuffled and cut into batches
    4. the batches are shuffled

Bias: a batch is no longer a fair draw. Its mean length drifts from that of the data, and with it the tokens of a step,
the kind of text and the gradient's scale. A bucket of more batches drifts less and pads more; one bucket is a plain
shuffle. With `--calculate-per-token-loss` each token
still counts the same over an epoch.

Invariants: every sample exactly once; the order depends on lengths, seed, epoch and sizes alone, so a run that has
consumed n samples resumes at `order[n:]`; all batches but the last are whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_balance.errors import BalanceError
from megatron_balance.planner import as_integers


def bucketed_order(
    lengths: Sequence[int] | NDArray[Any],
    *,
    batch_size: int,
    num_buckets: int | None = None,
    bucket_batches: int | None = None,
    seed: int = 0,
    epoch: int = 0,
) -> NDArray[np.int64]:
    """An order of all samples in which batches hold samples of similar lengths.

    Args:
        lengths: `[num_samples]` tokens.
        batch_size: samples of a batch.
        num_buckets: buckets of equal numbers of batches; this or `bucket_batches`.
        bucket_batches: batches of a bucket; the last bucket may have fewer. 1 is the least padding.
        seed: of all shuffling.
        epoch: another order for each.

    Returns:
        `[num_samples]` int64 sample ids; batch `i` is `order[i * batch_size : (i + 1) * batch_size]`.

    Raises:
        BalanceError: a size is below 1, seed or epoch is negative, or not exactly one of `num_buckets` and
            `bucket_batches` is given.

    Example:
        >>> bucketed_order([5, 1, 6, 2], batch_size=2, bucket_batches=1, seed=3).reshape(2, 2).tolist()
        [[0, 2], [3, 1]]
    """
    if (num_buckets is None) == (bucket_batches is None):
        raise BalanceError("bucketed_order takes either num_buckets or bucket_batches, not both, not neither.")
    sizes = {"batch_size": batch_size, "num_buckets": num_buckets, "bucket_batches": bucket_batches}
    for name, value in sizes.items():
        if value is not None and (isinstance(value, bool) or value < 1):
            raise BalanceError(f"{name} is {value!r}: it must be an integer of at least 1.")
    if seed < 0 or epoch < 0:
        raise BalanceError(f"seed is {seed} and epoch {epoch}: both must be at least 0.")
    tokens = as_integers(lengths, name="lengths")
    num_batches = tokens.size // batch_size
    if bucket_batches is None:
        assert num_buckets is not None
        bucket_batches = max(-(-num_batches // num_buckets), 1)

    random = np.random.default_rng([seed, epoch])
    shuffled = random.permutation(tokens.size)
    whole, rest = np.split(shuffled, [num_batches * batch_size])
    by_length = whole[np.argsort(tokens[whole], kind="stable")]
    bucket_samples = bucket_batches * batch_size
    buckets = [
        random.permutation(by_length[start : start + bucket_samples]) for start in range(0, whole.size, bucket_samples)
    ]
    batches = np.concatenate([*buckets, whole[:0]]).reshape(num_batches, batch_size)
    return np.concatenate([batches[random.permutation(num_batches)].reshape(-1), rest]).astype(np.int64)
