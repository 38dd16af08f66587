"""Assigns the samples of a TorchSpec dispatch to ranks, and orders the prompts of an epoch.

Approach A gives the samples of a dispatch to ranks by length:

    padded  the samples are sorted by length and cut into runs: the sum of the ranks' padded tokens is the least
            possible, and the slowest rank, the one with the longest sample, is no slower than that sample requires
    tokens  ranks get nearly the same number of tokens, by the planner's partition

Every rank gets exactly `num_samples / dp_size` samples, in order of arrival, because its data fetcher waits for that
many; the same samples in the same turn go to the same ranks. The rank with the longest run changes from turn to turn,
so that no rank is the slowest of every micro-batch of a step.

Approach C sorts the prompts of an epoch into dispatches of similar lengths, and shuffles the dispatches
(`bucketed_order`). Samples do not come back exactly in that order: inference runs several batches at
once, may fail on some, and the rest of an epoch stays in the pool until the next. Each of these shifts all dispatches
that follow. With a window, as in approach B, the dispatches form again around the oldest sample; with `window=1` they
do not. Every sample comes once an epoch. The order depends on lengths, seed, epoch and sizes alone, so that a run
resumes at `skip`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_balance.adapters.kit import even_parts
from megatron_balance.errors import BalanceError
from megatron_balance.planner import as_integers


def assign_ranks(lengths: Sequence[int], *, dp_size: int, cost: str, turn: int = 0) -> list[list[int]]:
    """Positions of the samples that each rank gets.

    Args:
        lengths: `[num_samples]` tokens, a multiple of `dp_size` samples.
        dp_size: ranks.
        cost: `padded` or `tokens`.
        turn: number of the dispatch.

    Returns:
        `[dp_size]` lists of `num_samples / dp_size` positions, ascending.
    """
    if cost == "padded":
        count = len(lengths) // dp_size
        runs = bucketed_order(lengths, batch_size=count, bucket_batches=1, epoch=turn)
        return [sorted(run) for run in runs.reshape(dp_size, count).tolist()]
    return [part.tolist() for part in even_parts(lengths, num_parts=dp_size, equal_count=True)]


def result_length(result: Any) -> int:
    """Tokens of one `InferenceOutput`, from `tensor_shapes["input_ids"]`; 0 where inference gave no shape."""
    shape = (result.tensor_shapes or {}).get("input_ids")
    return int(shape[-1]) if shape else 0


def data_lengths(samples: Sequence[Any]) -> list[int]:
    """Lengths of the samples of a data set, all in one unit.

    Tokens where every sample has `input_ids`, or `seq_len` as an offline record has; characters of
    `formatted_prompt` where tokenization is deferred.

    Raises:
        BalanceError: the samples have none of these.
    """
    for name in ("input_ids", "seq_len", "formatted_prompt"):
        if all(isinstance(sample, Mapping) and sample.get(name) is not None for sample in samples):
            return [_length(sample[name]) for sample in samples]
    raise BalanceError(
        "approach C needs the lengths of the data set, and its samples have neither input_ids, nor seq_len, nor "
        "formatted_prompt: load it with load_conversation_dataset, or use approach B."
    )


def _length(value: Any) -> int:
    if isinstance(value, int):
        return value
    shape = getattr(value, "shape", None)
    return len(value) if shape is None else int(shape[-1])


def bucketed_order(
    lengths: Sequence[int] | NDArray[Any],
    *,
    batch_size: int,
    bucket_batches: int,
    seed: int = 0,
    epoch: int = 0,
) -> NDArray[np.int64]:
    """An order of all samples in which batches hold samples of similar lengths.

    1. the samples that no whole batch needs are drawn at random and come last
    2. samples are shuffled and then sorted by length, so that equal lengths are in random order
    3. the order is cut into buckets of whole batches; each bucket is shuffled and cut into batches
    4. the batches are shuffled

    Bias: a batch is no longer a fair draw. Its mean length drifts from that of the data, and with it the tokens of a
    step, the kind of text and the gradient's scale. A bucket of more batches drifts less and pads more; one bucket is a
    plain shuffle. With `--calculate-per-token-loss` each token still counts the same over an epoch.

    Invariants: every sample exactly once; the order depends on lengths, seed, epoch and sizes alone, so a run that has
    consumed n samples resumes at `order[n:]`; all batches but the last are whole.

    Args:
        lengths: `[num_samples]` tokens.
        batch_size: samples of a batch.
        bucket_batches: batches of a bucket; the last bucket may have fewer. 1 is the least padding.
        seed: of all shuffling.
        epoch: another order for each.

    Returns:
        `[num_samples]` int64 sample ids; batch `i` is `order[i * batch_size : (i + 1) * batch_size]`.

    Example:
        >>> bucketed_order([5, 1, 6, 2], batch_size=2, bucket_batches=1, seed=3).reshape(2, 2).tolist()
        [[0, 2], [3, 1]]
    """
    tokens = as_integers(lengths, name="lengths")
    num_batches = tokens.size // batch_size
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
