"""Moves samples to the ranks that compute them, as bytes whose layout both sides compute from lengths and schema.

The samples that go from one rank to another are a block with one region a key, in the schema's order, which holds that
key of all samples. So a key costs one copy a block, and what is received is cut into views.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from megatron_balance.errors import BalanceError
from megatron_balance.runtime.comm import Device, exchange_parts
from megatron_balance.runtime.gather import GatheredLengths
from megatron_balance.samples.sample import KeySpec, Samples, aligned

Ids = NDArray[np.int64]


def reroute_samples(
    samples: Samples,
    *,
    destinations: ArrayLike,
    gathered: GatheredLengths,
    group: dist.ProcessGroup,
    sample_ids: Ids | None = None,
    device: Device = "cpu",
) -> tuple[Ids, Samples]:
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
        sample_ids: int64 `[num_copies]`, ascending, the sample that goes to each of as many destinations, where
            samples go to several ranks or to none; the same on all ranks, and no two copies to one rank.
        device: where samples and buffers live, on all ranks: `cuda` for NCCL.

    Returns:
        The ids of this rank's samples, ascending, and the samples, with the schema of all.

    Raises:
        BalanceError: samples that are not those whose lengths were gathered (a caller's mistake).
    """
    destinations = np.asarray(destinations, dtype=np.int64)
    sample_ids = np.arange(gathered.lengths.size) if sample_ids is None else sample_ids
    rank, homes = group.rank(), gathered.home_ranks[sample_ids]
    at_home = np.flatnonzero(gathered.home_ranks == rank)
    expected = gathered.lengths[at_home], gathered.ragged_lengths[at_home].ravel()
    actual = samples.lengths, samples.ragged_lengths.ravel()
    if gathered.schema is not None and not all(map(np.array_equal, actual, expected)):
        raise BalanceError(
            f"reroute_samples got samples of {samples.lengths.tolist()} tokens; those gathered had "
            f"{expected[0].tolist()}, or other entries of ragged keys: give those."
        )
    moves = homes != destinations
    staying = sample_ids[(homes == rank) & ~moves]
    ids, parts = [staying], [samples.select(np.searchsorted(at_home, staying))]
    if moves.any():
        leaving = _ids_by_rank(sample_ids, ranks=destinations, mask=moves & (homes == rank))
        coming = _ids_by_rank(sample_ids, ranks=homes, mask=moves & (destinations == rank))
        send_sizes = {to: _nbytes(ids, gathered=gathered) for to, ids in leaving.items()}
        receive_sizes = {home: _nbytes(ids, gathered=gathered) for home, ids in coming.items()}
        send, receive = (
            torch.empty(sum(sizes.values()), dtype=torch.uint8, device=device) for sizes in (send_sizes, receive_sizes)
        )
        for to, part in zip(send_sizes, send.split([*send_sizes.values()]), strict=True):
            _write(part, samples.select(np.searchsorted(at_home, leaving[to])), ids=leaving[to], gathered=gathered)
        exchange_parts(
            receive,
            send,
            receive_sizes=receive_sizes,
            send_sizes=send_sizes,
            group=group,
            operation="samples from the ranks that loaded them (exchange)",
        )
        for home, part in zip(receive_sizes, receive.split([*receive_sizes.values()]), strict=True):
            ids.append(coming[home])
            parts.append(_read(part, ids=coming[home], gathered=gathered))
    arrived = np.concatenate(ids)
    order = np.argsort(arrived)
    return arrived[order], replace(Samples.joined(parts).select(order), schema=gathered.schema)


def _ids_by_rank(ids: Ids, *, ranks: NDArray[np.int64], mask: NDArray[np.bool_]) -> dict[int, Ids]:
    """Those under the mask, ranks and ids ascending: the order on both sides."""
    return {rank: ids[mask & (ranks == rank)] for rank in np.unique(ranks[mask]).tolist()}


def _regions(ids: Ids, *, gathered: GatheredLengths) -> Iterator[tuple[KeySpec, list[int], slice]]:
    """For each key: itself, its entries of each of these samples, and its bytes within their block."""
    assert gathered.schema is not None, "there are samples"
    start, ragged = 0, iter(gathered.ragged_lengths[ids].T.tolist())
    for key in gathered.schema.keys:
        counts = [1] * len(ids)
        if key.kind != "per_sample":
            counts = next(ragged) if key.kind == "ragged" else gathered.lengths[ids].tolist()
        stop = start + sum(counts) * key.nbytes
        yield key, counts, slice(start, stop)
        start = aligned(stop)


def _nbytes(ids: Ids, *, gathered: GatheredLengths) -> int:
    """Bytes of the block of these samples."""
    *_, (_, _, last) = _regions(ids, gathered=gathered)
    return aligned(last.stop)


@torch.no_grad()
def _write(block: Tensor, samples: Samples, *, ids: Ids, gathered: GatheredLengths) -> None:
    for key, counts, region in _regions(ids, gathered=gathered):
        if region.start < region.stop:
            column, entries = samples.columns[key.name], block[region].view(key.dtype).view(sum(counts), *key.shape)
            (torch.stack if key.kind == "per_sample" else torch.cat)([*column], out=entries)


def _read(block: Tensor, *, ids: Ids, gathered: GatheredLengths) -> Samples:
    """Views of the block."""
    columns: dict[str, Sequence[Tensor]] = {}
    for key, counts, region in _regions(ids, gathered=gathered):
        entries = block[region].view(key.dtype).view(sum(counts), *key.shape)
        columns[key.name] = entries.unbind() if key.kind == "per_sample" else entries.split(counts)
    return Samples(gathered.schema, columns, gathered.lengths[ids])
