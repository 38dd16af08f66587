"""Moves samples to the ranks that compute them, in one all_to_all of bytes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import ArrayLike, NDArray

from megatron_balance.errors import BalanceError
from megatron_balance.runtime.gather import GatheredLengths
from megatron_balance.runtime.peers import waiting_for
from megatron_balance.runtime.sample import Sample, SampleSchema
from megatron_balance.runtime.wire import block_nbytes, read_block, write_block


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

    One `all_to_all_single` of bytes, in which every rank takes part, with or without samples; none where no sample
    moves. Splits are Python ints, so that a buffer may pass 2**31 bytes. Samples that stay are not sent.
    Samples that arrive are views of one receive buffer, which lives as long as any of them: clone tensors that outlive
    the step.

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
    destinations = _checked_destinations(destinations, gathered=gathered, group_size=group.size())
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
    rank = group.rank()
    schema = schema or gathered.schema
    if schema is None:
        return {}
    _check_samples(samples, gathered=gathered, rank=rank, schema=schema)
    home_device = samples[0].device if samples else torch.device(device or "cpu")
    device = torch.device(device or home_device)

    homes = gathered.home_ranks[sample_ids]
    moves = homes != destinations
    arrived: dict[int, Sample] = {}
    stay = sample_ids[(homes == rank) & ~moves]
    if len(stay):
        kept = [samples[index] for index in (stay - gathered.offset).tolist()]
        arrived.update(zip(stay.tolist(), _on_device(kept, schema=schema, device=device), strict=True))

    if moves.any():
        leaving, coming = (homes == rank) & moves, (destinations == rank) & moves
        ids_to = _by_rank(sample_ids[leaving], ranks=destinations[leaving], group_size=group.size())
        ids_from = _by_rank(sample_ids[coming], ranks=homes[coming], group_size=group.size())
        lengths_from = [gathered.lengths[ids].tolist() for ids in ids_from]
        samples_to = [[samples[index] for index in (ids - gathered.offset).tolist()] for ids in ids_to]

        send_nbytes = [block_nbytes(schema, lengths=gathered.lengths[ids].tolist()) for ids in ids_to]
        receive_nbytes = [block_nbytes(schema, lengths=lengths) for lengths in lengths_from]
        send = torch.empty(sum(send_nbytes), dtype=torch.uint8, device=home_device)
        for block, outgoing in zip(send.split(send_nbytes), samples_to, strict=True):
            if outgoing:  # most pairs of a large group exchange nothing
                write_block(block, samples=outgoing, schema=schema)
        receive = torch.empty(sum(receive_nbytes), dtype=torch.uint8, device=device)
        send = send.to(device)
        with waiting_for("samples from the ranks that loaded them (exchange)", group=group):
            dist.all_to_all_single(receive, send, receive_nbytes, send_nbytes, group=group)
        for block, ids, lengths in zip(receive.split(receive_nbytes), ids_from, lengths_from, strict=True):
            if lengths:
                here = read_block(block, lengths=lengths, schema=schema, segment_lengths=gathered.segments_of(ids))
                arrived.update(zip(ids.tolist(), here, strict=True))

    return {sample_id: arrived[sample_id] for sample_id in sorted(arrived)}


def _checked_destinations(destinations: ArrayLike, *, gathered: GatheredLengths, group_size: int) -> NDArray[np.int64]:
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


def _check_samples(samples: Sequence[Sample], *, gathered: GatheredLengths, rank: int, schema: SampleSchema) -> None:
    """The layout of the bytes follows from the gathered lengths, so a sample that differs would be read as garbage."""
    own = np.flatnonzero(gathered.home_ranks == rank)
    expected, given = gathered.lengths[own].tolist(), [sample.length for sample in samples]
    if given != expected:
        raise BalanceError(f"reroute_samples got samples of {given} tokens; those gathered had {expected}.")
    segments = gathered.segments_of(own) or [(length,) for length in expected]
    for index, (sample, of_sample) in enumerate(zip(samples, segments, strict=True)):
        if sample.segment_lengths != of_sample:
            raise BalanceError(
                f"reroute_samples: sample {index} has sequences of {sample.segment_lengths} tokens; the one gathered "
                f"had {of_sample}."
            )
        if not schema.fits(sample):
            difference = ", ".join(SampleSchema.of(sample).differences(schema))
            raise BalanceError(f"reroute_samples: sample {index} does not fit the schema: {difference}.")


def _by_rank(ids: NDArray[np.int64], *, ranks: NDArray[np.int64], group_size: int) -> list[NDArray[np.int64]]:
    """The ids (rising) in one array for each rank (rising in each): the order both sides keep."""
    order = np.argsort(ranks, kind="stable")
    counts = np.bincount(ranks, minlength=group_size)
    return np.split(ids[order], np.cumsum(counts)[:-1])


def _on_device(samples: Sequence[Sample], *, schema: SampleSchema, device: torch.device) -> Sequence[Sample]:
    """The samples themselves where they already are there, else all of them in one copy."""
    # `cuda` without an index means the current one: compare types, then indices where both are given.
    here = samples[0].device
    if here.type == device.type and (device.index is None or here.index == device.index):
        return samples
    lengths = [sample.length for sample in samples]
    block = torch.empty(block_nbytes(schema, lengths=lengths), dtype=torch.uint8, device=here)
    write_block(block, samples=samples, schema=schema)
    segments = [sample.segment_lengths for sample in samples]
    return read_block(block.to(device), lengths=lengths, schema=schema, segment_lengths=segments)
