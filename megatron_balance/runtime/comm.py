"""Collectives and messages between ranks, small enough for gloo; an error names the ranks that did not answer.

torch reports a lost connection or an elapsed timeout, but not what was waited for. Every collective of this package
runs in `waiting_for`, which names it; `with_step_context` adds the iteration. Only tensors are sent, nothing pickled.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from megatron_balance.errors import BalanceError

MAX_RANKS_NAMED = 8  # an error on a thousand ranks must stay readable

_ADVICE = (
    "A rank has died, hangs or was cut off: the first error in the logs of the other ranks says why. If one was only "
    "slow, raise --distributed-timeout-minutes."
)

_GLOO_LOST = re.compile(r"gloo.*(Timed out|Connection closed|Connection reset|Broken pipe|No route|pair closure)", re.S)
"""A lost peer in the text of gloo's errors, which are bare RuntimeErrors."""

Device = torch.device | str
Value = TypeVar("Value", bound=Hashable)


class PeerError(BalanceError):
    """A rank did not answer: it has died, hangs, or was cut off."""


@contextlib.contextmanager
def waiting_for(operation: str, *, group: dist.ProcessGroup | None = None) -> Iterator[None]:
    """Turn the failure of a collective into a PeerError that names the operation and the group, if it is given."""
    try:
        yield
    except RuntimeError as error:  # gloo raises it bare; torch.distributed's own errors derive from it
        ranks = "the other ranks" if group is None else f"world {named_ranks(dist.get_process_group_ranks(group))}"
        first_line = (str(error).strip() or type(error).__name__).splitlines()[0]
        # Without gloo's source location and its guesses.
        first_line = re.sub(r"^\[\S+:\d+\] ", "", first_line).partition(". This is typically")[0].rstrip(".")
        raise PeerError(
            f"waited for {operation} among {ranks}, and not all answered ({first_line}). {_ADVICE}"
        ) from error


@contextlib.contextmanager
def with_step_context(step: str) -> Iterator[None]:
    """Add the step, `iteration 7`, to errors of lost peers, also in collectives that are not this package's."""
    try:
        yield
    except PeerError as error:
        raise PeerError(f"{step}: {error}") from error.__cause__
    except RuntimeError as error:
        if isinstance(error, dist.DistError) or _GLOO_LOST.search(str(error)):
            error.add_note(
                f"megatron_balance: {step}: Megatron waited for other ranks in a collective of its own, and not all "
                f"answered. {_ADVICE}"
            )
        raise


def named_ranks(ranks: Sequence[int]) -> str:
    """`rank 3`, or `ranks 1, 2 and 7 more`."""
    named = ", ".join(map(str, ranks[:MAX_RANKS_NAMED]))
    more = f" and {len(ranks) - MAX_RANKS_NAMED} more" if len(ranks) > MAX_RANKS_NAMED else ""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {named}{more}"


def ranks_by_value(values: Iterable[Value], *, group: dist.ProcessGroup | None = None) -> dict[Value, str]:
    """Each value of `[num_ranks]`, in the order in which they first occur, and the named world ranks that have it."""
    names = None if group is None else dist.get_process_group_ranks(group)
    ranks: dict[Value, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(value, []).append(rank if names is None else names[rank])
    return {value: named_ranks(members) for value, members in ranks.items()}


def all_gather_row(
    row: NDArray[Any], *, group: dist.ProcessGroup, operation: str, device: Device = "cpu"
) -> NDArray[Any]:
    """`[n]` of every rank → `[group_size, n]`; buffers live on the device, `cuda` for NCCL."""
    sent = torch.from_numpy(row).to(device)
    gathered = sent.new_empty(group.size() * len(row))
    with waiting_for(operation, group=group):
        dist.all_gather_into_tensor(gathered, sent, group=group)
        return gathered.view(group.size(), -1).cpu().numpy()


def all_gather_bytes(data: bytes, *, group: dist.ProcessGroup, operation: str, device: Device = "cpu") -> list[bytes]:
    """The bytes of every rank, after their numbers."""
    sizes = all_gather_row(np.array([len(data)]), group=group, operation=operation, device=device)[:, 0]
    row = np.frombuffer(data.ljust(int(sizes.max()), b"\0"), dtype=np.uint8).copy()
    rows = all_gather_row(row, group=group, operation=operation, device=device)
    return [row[:size].tobytes() for row, size in zip(rows, sizes, strict=True)]


def exchange_parts(
    receive: Tensor,
    send: Tensor,
    *,
    receive_sizes: Mapping[int, int],
    send_sizes: Mapping[int, int],
    group: dist.ProcessGroup,
    operation: str,
    collective: bool | None = None,
) -> None:
    """Exchange parts of two buffers between the ranks that share some; sizes are entries by the rank in the group.

    Between CPUs one message goes to and comes from each rank named; a collective of all ranks would connect every rank
    to every other (docs/scale.md). All receives are posted before the first send, and none is waited for before the
    last: gloo moves messages in any order, so nothing can deadlock. Between GPUs, or if `collective` says so, all ranks
    call one collective, as the first call over NCCL must be.
    """
    with waiting_for(operation, group=group):
        if receive.device.type != "cpu" if collective is None else collective:
            splits = [[sizes.get(rank, 0) for rank in range(group.size())] for sizes in (receive_sizes, send_sizes)]
            dist.all_to_all_single(receive, send, *splits, group=group)
            return
        works = [dist.irecv(part, group=group, group_src=rank) for rank, part in _parts(receive, receive_sizes)]
        works += [dist.isend(part, group=group, group_dst=rank) for rank, part in _parts(send, send_sizes)]
        timeout = _timeout_of(group)
        for work in works:
            assert work is not None, "this rank is a member"
            work.wait(timeout)


def _parts(buffer: Tensor, sizes: Mapping[int, int]) -> list[tuple[int, Tensor]]:
    parts = zip(sizes, buffer.split([*sizes.values()]), strict=True)
    return [(rank, part) for rank, part in parts if part.numel()]


def _timeout_of(group: dist.ProcessGroup) -> timedelta:
    """Of the group's collectives now (`--distributed-timeout-seconds-after-init`): messages keep the one at its making.

    torch has no public name for it, and wraps the group under TORCH_DISTRIBUTED_DEBUG=DETAIL.
    """
    backend: Any = group._get_backend(torch.device("cpu"))
    return getattr(backend, "wrapped_pg", backend).options._timeout
