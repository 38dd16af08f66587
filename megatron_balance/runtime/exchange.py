"""Moves samples to the ranks that compute them, as bytes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import ArrayLike, NDArray

from megatron_balance.errors import BalanceError
from megatron_balance.runtime.gathered import GatheredLengths
from megatron_balance.runtime.prepared_exchange import check_samples, prepare_exchange
from megatron_balance.samples.sample import Sample, SampleSchema


def reroute_samples(
    samples: Sequence[Sample],
    *,
    destinations: ArrayLike,
    gathered: GatheredLengths,
    group: dist.ProcessGroup,
    schema: SampleSchema | None = None,
    device: torch.device | str | None = None,
) -> dict[int, Sample]:
    """Send every sample to its destination.

    Every rank takes part, with or without samples. One message goes to each rank that gets samples of this one; between
    GPUs all ranks call one `all_to_all_single`, unless no sample moves. Sizes are Python ints, so that a buffer may
    pass 2**31 bytes. Samples that stay are not sent. Samples that arrive are views of one receive buffer, which lives
    as long as any of them: clone tensors that outlive the step.

    Args:
        samples: this rank's, in the order in which their lengths were gathered.
        destinations: int64 `[num_samples]`, the rank in the group for every sample id; the same on all ranks.
        gathered: the outcome of `gather_lengths` on the same group.
        group: the ranks that exchange.
        schema: of all samples; `gathered.schema` by default.
        device: where the buffers and all returned samples live. By default the samples' device, or the CPU on a rank
            that has none; NCCL needs `cuda`, the same on all ranks.

    Returns:
        Sample id → sample, for this rank's ids in rising order.

    Raises:
        BalanceError: destinations of another shape or out of range (on every rank), or samples that are not those
            whose lengths were gathered (a caller's mistake).
    """
    destinations = checked_destinations(destinations, gathered=gathered, group_size=group.size())
    return send_copies(
        samples,
        sample_ids=np.arange(destinations.size, dtype=np.int64),
        destinations=destinations,
        gathered=gathered,
        group=group,
        schema=schema,
        device=device,
    )


def send_copies(
    samples: Sequence[Sample],
    *,
    sample_ids: NDArray[np.int64],
    destinations: NDArray[np.int64],
    gathered: GatheredLengths,
    group: dist.ProcessGroup,
    schema: SampleSchema | None = None,
    device: torch.device | str | None = None,
) -> dict[int, Sample]:
    """`reroute_samples` where a sample goes to several ranks, or to none.

    Args:
        samples: as there.
        sample_ids: int64 `[num_copies]`, the sample of each copy, rising; the same on all ranks.
        destinations: int64 `[num_copies]`, the rank in the group that it goes to; no two copies to one rank.
        gathered: as there, and so are the others.
        group: the ranks that exchange.

    Returns:
        Sample id → sample, for the copies that go to this rank, ids rising.

    Raises:
        BalanceError: samples that are not those whose lengths were gathered.
    """
    known = schema or gathered.schema
    if known is not None:
        check_samples(samples, gathered=gathered, rank=group.rank(), schema=known)
    prepared = prepare_exchange(
        samples,
        sample_ids=sample_ids,
        destinations=destinations,
        gathered=gathered,
        group=group,
        schema=schema,
        device=device,
    )
    return prepared.run(group=group)


def checked_destinations(destinations: ArrayLike, *, gathered: GatheredLengths, group_size: int) -> NDArray[np.int64]:
    """Destinations as `reroute_samples` takes them, int64 `[num_samples]`; BalanceError where they are not valid."""
    destinations = np.asarray(destinations, dtype=np.int64)
    if destinations.shape != gathered.lengths.shape:
        raise BalanceError(
            f"destinations has shape {destinations.shape}: it must be {gathered.lengths.shape}, a rank for each sample."
        )
    wrong = (destinations < 0) | (destinations >= group_size)
    if wrong.any():
        sample_id = int(np.argmax(wrong))
        raise BalanceError(
            f"destinations[{sample_id}] is {destinations[sample_id]}: it must be a rank of the group, 0 to "
            f"{group_size - 1}."
        )
    return destinations
