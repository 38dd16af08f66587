"""Files of the waiting samples (`sample_pool.py`) in a checkpoint: one share for each data-parallel rank.

Every share holds the number of shares and the look-ahead state, which is the same on all ranks. This identifies a share
that another run left in the folder, or that a killed run did not replace.

Invariants: a read returns the content of one save, every waiting sample once; otherwise a BalanceError names the file
and the remedy.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from megatron_balance.errors import BalanceError
from megatron_balance.files.atomic_write import atomic_write
from megatron_balance.files.untrusted import opened_archive, parse_json
from megatron_balance.samples.sample import Sample, SampleSchema
from megatron_balance.samples.wire import block_nbytes, read_block, write_block

FORMAT = 1
"""Of the files; another number is another layout."""


@dataclass(frozen=True)
class PoolIndex:
    """Content of all shares, without the samples themselves.

    Attributes:
        look_ahead: `LookAhead.state()` of the run that saved.
        num_shares: data-parallel ranks of that run.
        schema: of the samples; None if there was no sample yet.
        segment_lengths: of each sample that waits, arrival number → tokens of its sequences; share after share.
        share_of: arrival number → rank whose share holds the sample.
    """

    look_ahead: Mapping[str, Any]
    num_shares: int
    schema: SampleSchema | None
    segment_lengths: Mapping[int, tuple[int, ...]]
    share_of: Mapping[int, int]


def has_pool(folder: Path) -> bool:
    """True if the folder holds a saved pool."""
    return any(folder.glob("pool_rank*.npz"))


def forget_shares(folder: Path, *, from_rank: int) -> None:
    """Remove the shares of this rank and those above it, which an earlier run may have left."""
    for path in folder.glob("pool_rank*.npz"):
        if path >= _path(folder, from_rank):
            path.unlink(missing_ok=True)


def write_share(
    folder: Path,
    *,
    rank: int,
    num_shares: int,
    look_ahead: Mapping[str, Any],
    schema: SampleSchema | None,
    samples: Mapping[int, Sample],
) -> None:
    """Write the samples that wait on one rank.

    Args:
        folder: of the checkpoint's state.
        rank: in the data-parallel group.
        num_shares: ranks of that group.
        look_ahead: `LookAhead.state()`, the same on every rank.
        schema: of all samples, or None if there is none yet.
        samples: arrival number → sample, of this rank.
    """
    here = list(samples.values())
    block = torch.empty(0, dtype=torch.uint8)
    if schema is not None and here:
        block = torch.empty(block_nbytes(schema, lengths=[sample.length for sample in here]), dtype=torch.uint8)
        write_block(block, samples=here, schema=schema)
    with atomic_write(_path(folder, rank)) as file:
        np.savez(
            file,
            format=np.array(FORMAT),
            num_shares=np.array(num_shares),
            look_ahead=_as_bytes(json.dumps(look_ahead).encode()),
            schema=_as_bytes(b"" if schema is None else schema.to_bytes()),
            arrivals=np.array(list(samples), dtype=np.int64),
            num_segments=np.array([len(sample.segment_lengths) for sample in here], dtype=np.int64),
            segment_lengths=np.array([n for sample in here for n in sample.segment_lengths], dtype=np.int64),
            block=block.numpy(),
        )


def read_index(folder: Path) -> PoolIndex:
    """Read the index of the waiting samples, and check that none is missing.

    Raises:
        BalanceError: a share is missing, unreadable or from another save; or a sample is missing or duplicated.
    """
    with _opened(_path(folder, 0)) as first:
        num_shares, text = int(first["num_shares"]), first["look_ahead"].tobytes()
        look_ahead: dict[str, Any] = parse_json(text)
        waiting = sorted(map(int, look_ahead["arrivals"]))
    schema: SampleSchema | None = None
    segments: dict[int, tuple[int, ...]] = {}
    share_of: dict[int, int] = {}
    for rank in range(num_shares):
        path = _path(folder, rank)
        with _opened(path) as share:
            if int(share["num_shares"]) != num_shares or share["look_ahead"].tobytes() != text:
                raise BalanceError(
                    f"{path} and {_path(folder, 0).name} are of different saves: the run that saved was killed before "
                    f"it had replaced what lay there. {_remedy(folder)}"
                )
            if share["schema"].size:
                schema = SampleSchema.from_bytes(share["schema"].tobytes())
            arrivals = share["arrivals"].tolist()
            segments |= zip(arrivals, _segments_of(share), strict=True)
            share_of |= dict.fromkeys(arrivals, rank)
    if sorted(segments) != waiting:
        raise BalanceError(f"{folder} holds {len(segments)} of the {len(waiting)} samples that wait. {_remedy(folder)}")
    return PoolIndex(look_ahead, num_shares, schema, segments, share_of)


def read_samples(folder: Path, *, rank: int, schema: SampleSchema) -> dict[int, Sample]:
    """The samples of one share: arrival number → sample.

    Args:
        folder: of the checkpoint's state.
        rank: whose share.
        schema: of the samples (`PoolIndex.schema`).

    Raises:
        BalanceError: the share cannot be read.
    """
    with _opened(_path(folder, rank)) as share:
        segments = _segments_of(share)
        block = torch.from_numpy(share["block"])
        lengths = [sum(of_sample) for of_sample in segments]
        samples = read_block(block, lengths=lengths, schema=schema, segment_lengths=segments) if segments else []
        return dict(zip(share["arrivals"].tolist(), samples, strict=True))


@contextmanager
def _opened(path: Path) -> Iterator[Mapping[str, NDArray[Any]]]:
    try:
        with opened_archive(path, unbounded=True) as share:
            if "format" not in share or int(share["format"]) != FORMAT:
                raise BalanceError(f"{path} was written by another version of megatron_balance. {_remedy(path.parent)}")
            yield share
    except FileNotFoundError as error:
        raise BalanceError(f"{path} is missing. {_remedy(path.parent)}") from error
    except BalanceError:
        raise
    except (OSError, ValueError) as error:
        raise BalanceError(f"{path} is damaged ({error}). {_remedy(path.parent)}") from error


def _remedy(folder: Path) -> str:
    return (
        "Copy the whole folder along with its checkpoint, or resume from another checkpoint (--ckpt-step), or delete "
        f"{folder} to go on without the samples that wait there."
    )


def _segments_of(share: Mapping[str, NDArray[Any]]) -> Sequence[tuple[int, ...]]:
    ends = np.cumsum(share["num_segments"]).tolist()
    flat = share["segment_lengths"].tolist()
    return [tuple(flat[start:end]) for start, end in zip([0, *ends], ends, strict=False)]


def _path(folder: Path, rank: int) -> Path:
    return folder / f"pool_rank{rank:05d}.npz"


def _as_bytes(text: bytes) -> NDArray[np.uint8]:
    return np.frombuffer(text, dtype=np.uint8)
