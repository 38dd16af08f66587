"""Moves samples to the ranks that compute them, as bytes, in two halves: writing what a rank sends, and moving it.

Any thread may write (`prepare_exchange`); ranks exchange together (`PreparedExchange.run`). A sample that moves is
copied twice: into the send buffer, and by whoever packs the views of what arrived.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from megatron_balance.errors import BalanceError
from megatron_balance.runtime.collectives import exchange_with_all, exchange_with_peers
from megatron_balance.runtime.gather import GatheredLengths
from megatron_balance.runtime.peers import waiting_for
from megatron_balance.samples.sample import Sample, SampleSchema
from megatron_balance.samples.wire import block_nbytes, read_block, write_block


class HostBuffers:
    """The buffers of one rank, as large as the largest step so far.

    Large blocks of fresh memory cost a page fault every 4 KiB, which takes three times as long as the copy into them.
    torch keeps pinned memory and that of GPUs by itself.
    """

    def __init__(self) -> None:
        self._kept: dict[str, Tensor] = {}

    def take(self, name: str, *, nbytes: int) -> Tensor:
        """A buffer, uint8 `[nbytes]`: the memory that was returned for this name before, whose content is lost."""
        if name not in self._kept or self._kept[name].numel() < nbytes:
            self._kept.pop(name, None)  # before the larger one is made
            self._kept[name] = torch.empty(nbytes, dtype=torch.uint8)
        return self._kept[name][:nbytes]


@dataclass(frozen=True)
class Block:
    """Samples that go from one rank to another, or stay on one.

    Attributes:
        ids: of the samples, rising.
        lengths: tokens of each.
        segments: tokens of the sequences of each; None where every sample is one sequence.
        ragged: entries of the ragged keys of each; empty where there is no such key.
        nbytes: of the block.
    """

    ids: list[int]
    lengths: list[int]
    segments: list[tuple[int, ...]] | None
    ragged: list[list[int]]
    nbytes: int

    @classmethod
    def of(cls, ids: NDArray[np.int64], *, gathered: GatheredLengths, schema: SampleSchema) -> Block:
        """The block of these samples."""
        if not len(ids):  # most pairs of a large group exchange nothing
            return cls([], [], None, [], 0)
        lengths, ragged = gathered.lengths[ids].tolist(), gathered.ragged_of(ids)
        nbytes = block_nbytes(schema, lengths=lengths, ragged_lengths=ragged)
        return cls(ids.tolist(), lengths, gathered.segments_of(ids), ragged, nbytes)

    def samples_in(self, buffer: Tensor, *, schema: SampleSchema) -> dict[int, Sample]:
        """Sample id → sample, as views of the buffer, uint8 `[nbytes]`."""
        if not self.ids:
            return {}
        samples = read_block(
            buffer,
            lengths=self.lengths,
            schema=schema,
            segment_lengths=self.segments,
            ragged_lengths=self.ragged,
        )
        return dict(zip(self.ids, samples, strict=True))


@dataclass(frozen=True, eq=False)
class PreparedExchange:
    """This rank's side of an exchange, up to the first message.

    Attributes:
        schema: of all samples; None where no rank has any.
        device: where the samples are to live.
        staying: samples of this rank that stay and already live there.
        kept: those that stay and live elsewhere.
        kept_bytes: uint8 `[kept.nbytes]`, those samples.
        send: uint8 `[sum of send_nbytes]`, where this rank's samples live.
        send_nbytes: rank → bytes for it, ranks rising; those that get any.
        arriving: rank → the block from it, ranks rising; those that send any.
        some_move: a sample of any rank moves.
        buffers: to receive in, or None for fresh memory.
    """

    schema: SampleSchema | None
    device: torch.device
    staying: dict[int, Sample]
    kept: Block
    kept_bytes: Tensor
    send: Tensor
    send_nbytes: Mapping[int, int]
    arriving: Mapping[int, Block]
    some_move: bool
    buffers: HostBuffers | None = None

    def run(self, *, group: dist.ProcessGroup) -> dict[int, Sample]:
        """Exchange with the other ranks; once.

        Args:
            group: the ranks that it was prepared for, or another group of the same ranks, in the same order.

        Returns:
            Sample id → sample, for the copies that go to this rank, ids rising.
        """
        if self.schema is None:
            return {}
        arrived = dict(self.staying)
        if self.kept.ids:
            buffer = self.kept_bytes.to(self.device, non_blocking=True)
            arrived.update(self.kept.samples_in(buffer, schema=self.schema))
        if self.some_move:
            receive_nbytes = {rank: block.nbytes for rank, block in self.arriving.items()}
            receive = _buffer("receive", nbytes=sum(receive_nbytes.values()), device=self.device, buffers=self.buffers)
            send = self.send.to(self.device, non_blocking=True)
            move = exchange_with_peers if self.device.type == "cpu" else exchange_with_all
            with waiting_for("samples from the ranks that loaded them (exchange)", group=group):
                move(receive, send, receive_sizes=receive_nbytes, send_sizes=self.send_nbytes, group=group)
            for buffer, block in zip(receive.split([*receive_nbytes.values()]), self.arriving.values(), strict=True):
                arrived.update(block.samples_in(buffer, schema=self.schema))
        return {sample_id: arrived[sample_id] for sample_id in sorted(arrived)}


def prepare_exchange(
    samples: Sequence[Sample],
    *,
    sample_ids: NDArray[np.int64],
    destinations: NDArray[np.int64],
    gathered: GatheredLengths,
    group: dist.ProcessGroup,
    schema: SampleSchema | None = None,
    device: torch.device | str | None = None,
    buffers: HostBuffers | None = None,
) -> PreparedExchange:
    """Write what this rank sends. No collective; arguments as for `send_copies`, but for the last.

    Bytes that go from host memory to a GPU are written to pinned memory, from which the copy does not wait.

    Args:
        samples: as there, and so are the others; they are those whose lengths were gathered (`check_samples`).
        sample_ids: int64 `[num_copies]`.
        destinations: int64 `[num_copies]`.
        gathered: lengths of all samples.
        group: the ranks that exchange.
        schema: of all samples.
        device: where the samples are to live.
        buffers: for exchanges between CPUs. What arrived in one step is then lost with the next: pack it before.
    """
    rank = group.rank()
    schema = schema or gathered.schema
    home_device = samples[0].device if samples else torch.device(device or "cpu")
    device = torch.device(device or home_device)
    nothing = torch.empty(0, dtype=torch.uint8)
    no_block = Block([], [], None, [], 0)
    if schema is None:
        return PreparedExchange(None, device, {}, no_block, nothing, nothing, {}, {}, False)
    pin_memory = home_device.type == "cpu" and device.type == "cuda"

    def own(ids: Sequence[int]) -> list[Sample]:
        return [samples[sample_id - gathered.offset] for sample_id in ids]

    def written(name: str, blocks: Sequence[Block]) -> Tensor:
        sizes = [block.nbytes for block in blocks]
        buffer = _buffer(name, nbytes=sum(sizes), device=home_device, pin_memory=pin_memory, buffers=buffers)
        for part, block in zip(buffer.split(sizes), blocks, strict=True):
            if block.ids:
                write_block(part, samples=own(block.ids), schema=schema)
        return buffer

    homes = gathered.home_ranks[sample_ids]
    moves = homes != destinations
    staying, kept = {}, Block.of(sample_ids[(homes == rank) & ~moves], gathered=gathered, schema=schema)
    if _is_on(home_device, device):
        staying, kept = dict(zip(kept.ids, own(kept.ids), strict=True)), no_block
    leaving, coming = (homes == rank) & moves, (destinations == rank) & moves
    departing = _blocks(sample_ids[leaving], ranks=destinations[leaving], gathered=gathered, schema=schema)
    return PreparedExchange(
        schema,
        device,
        staying,
        kept,
        written("kept", [kept]),
        written("send", [*departing.values()]),
        {other: block.nbytes for other, block in departing.items()},
        _blocks(sample_ids[coming], ranks=homes[coming], gathered=gathered, schema=schema),
        bool(moves.any()),
        buffers,
    )


def _buffer(
    name: str, *, nbytes: int, device: torch.device, pin_memory: bool = False, buffers: HostBuffers | None
) -> Tensor:
    """uint8 `[nbytes]`."""
    if buffers is not None and device.type == "cpu" and not pin_memory:
        return buffers.take(name, nbytes=nbytes)
    return torch.empty(nbytes, dtype=torch.uint8, device=device, pin_memory=pin_memory)


def check_samples(samples: Sequence[Sample], *, gathered: GatheredLengths, rank: int, schema: SampleSchema) -> None:
    """The layout of the bytes follows from the gathered lengths, so a sample that differs would be read as garbage."""
    own = np.flatnonzero(gathered.home_ranks == rank)
    expected, given = gathered.lengths[own].tolist(), [sample.length for sample in samples]
    if given != expected:
        raise BalanceError(f"reroute_samples got samples of {given} tokens; those gathered had {expected}.")
    entries, has = gathered.ragged_of(own), [list(sample.ragged_lengths) for sample in samples]
    if entries and has != entries:
        raise BalanceError(f"reroute_samples got samples of {has} ragged entries; those gathered had {entries}.")
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


def _blocks(
    ids: NDArray[np.int64], *, ranks: NDArray[np.int64], gathered: GatheredLengths, schema: SampleSchema
) -> dict[int, Block]:
    """Rank → the block of its samples (ids rising), ranks rising: the order that both sides keep."""
    return {rank: Block.of(ids[ranks == rank], gathered=gathered, schema=schema) for rank in sorted({*ranks.tolist()})}


def _is_on(here: torch.device, device: torch.device) -> bool:
    """True if both are one device; `cuda` without an index means the current one."""
    return here.type == device.type and (device.index is None or here.index == device.index)


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
