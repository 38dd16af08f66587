"""Messages, bytes and sockets of one rank, as formulas: integers alone, checked against counts by `meetings.py`.

Gloo's algorithms (its `allgather.cc`, `alltoallv.cc`, `gather.cc`, `broadcast.cc`), on n ranks:

- all_gather: a ring of n - 1 rounds. In each a rank sends a row to one neighbour and receives one from the other, as
  two messages of half a row.
- gather: a message of each rank to the first.
- broadcast: a binomial tree.

Messages between two ranks are what this package's exchange and `largest_row` consist of.

Besides its payload a message costs frames of `FRAME_NBYTES`: one before the data and one that announces it from the
sender, one that asks for it from the receiver.

A rank's meetings for a step, all of them but the last in its background threads:

    gather     all_gather of the lengths, data-parallel group
    compare    largest row of a failure and the plan's digest, data-parallel group
    exchange   a message to each rank that gets samples of this one, data-parallel group
    agree      largest row of a failure, data-parallel group
    replica    gather of six numbers and a broadcast of the outcome among the first ranks of a model replica's
               tensor-parallel groups, and a broadcast of it within each such group
    figures    at each log interval: gather of seconds and broadcast of figures, ranks that measure
    calibrate  at a refit: gather of measurements and broadcast of coefficients, ranks that read data
    choose     as the step begins: a broadcast of one number to ranks without data, down the same two levels
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

FRAME_NBYTES = 48
"""Of gloo's header of a message over TCP."""

FRAMES_OF_SENDER = 2
FRAMES_OF_RECEIVER = 1

INLINE_NUMBERS = 124
"""Of a step, which come with the outcome of a replica."""

INT = FLOAT = 8
"""Bytes of an int64 and of a float64."""


@dataclass(frozen=True)
class Traffic:
    """Of one rank, for one collective or several."""

    sent: int = 0
    received: int = 0
    sent_nbytes: int = 0
    received_nbytes: int = 0

    def __add__(self, other: Traffic) -> Traffic:
        """One after the other."""
        return Traffic(
            self.sent + other.sent,
            self.received + other.received,
            self.sent_nbytes + other.sent_nbytes,
            self.received_nbytes + other.received_nbytes,
        )

    @property
    def frames_sent_nbytes(self) -> int:
        """Bytes that leave besides the payload."""
        return FRAME_NBYTES * (FRAMES_OF_SENDER * self.sent + FRAMES_OF_RECEIVER * self.received)


def all_gather(num_ranks: int, *, row_nbytes: int) -> Traffic:
    """A row of each rank to all; the same on every rank."""
    rounds = num_ranks - 1
    return Traffic(2 * rounds, 2 * rounds, rounds * row_nbytes, rounds * row_nbytes)


def exchange(*, sent_nbytes: Mapping[int, int], received_nbytes: Mapping[int, int]) -> Traffic:
    """A message for each other rank that shares samples with this one."""
    return Traffic(len(sent_nbytes), len(received_nbytes), sum(sent_nbytes.values()), sum(received_nbytes.values()))


def largest_row(num_ranks: int, *, row_nbytes: int) -> Traffic:
    """The largest numbers of all rows to all ranks, in ceil(log2 n) rounds; the same on every rank."""
    rounds = (num_ranks - 1).bit_length()
    return Traffic(rounds, rounds, rounds * row_nbytes, rounds * row_nbytes)


def gather(num_ranks: int, *, rank: int, row_nbytes: int) -> Traffic:
    """A row of each rank to the first."""
    if rank == 0:
        return Traffic(0, num_ranks - 1, 0, (num_ranks - 1) * row_nbytes)
    return Traffic(1, 0, row_nbytes, 0)


def broadcast(num_ranks: int, *, rank: int, row_nbytes: int) -> Traffic:
    """A row of the first rank to all: each rank passes it on to those that lie a power of two above it.

    A rank receives it from the one without its highest bit, and sends to those with one more, higher bit.
    """
    children = sum(rank < 1 << bit and rank + (1 << bit) < num_ranks for bit in range(num_ranks.bit_length()))
    received = int(rank > 0)
    return Traffic(children, received, children * row_nbytes, received * row_nbytes)


def gather_lengths(dp_size: int, *, row_values: int, header_fields: int) -> Traffic:
    """The lengths of all samples."""
    return all_gather(dp_size, row_nbytes=INT * (header_fields + row_values))


def agree(dp_size: int) -> Traffic:
    """A failure and the plan's digest: to compare plans, and once more when all have packed."""
    return largest_row(dp_size, row_nbytes=3 * INT)


def share_among_firsts(num_firsts: int, *, rank: int, num_numbers: int) -> Traffic:
    """Traffic of sharing a step between the first ranks of a replica's tensor-parallel groups."""
    if num_firsts == 1:
        return Traffic()
    return gather(num_firsts, rank=rank, row_nbytes=6 * INT) + pass_on(num_firsts, rank=rank, num_numbers=num_numbers)


def pass_on(num_ranks: int, *, rank: int, num_numbers: int) -> Traffic:
    """The outcome, among the firsts of a replica or within a tensor-parallel group."""
    outcome = broadcast(num_ranks, rank=rank, row_nbytes=INT * (4 + INLINE_NUMBERS))
    more = max(num_numbers - INLINE_NUMBERS, 0)
    return outcome + broadcast(num_ranks, rank=rank, row_nbytes=INT * more) if more else outcome


def choose(num_ranks: int, *, rank: int) -> Traffic:
    """Broadcast of the source of the beginning step's data; groups as for `pass_on`."""
    return broadcast(num_ranks, rank=rank, row_nbytes=INT)


def log_figures(num_measuring: int, *, rank: int, num_steps: int, num_figures: int) -> Traffic:
    """Seconds to the first rank, figures to all."""
    seconds = gather(num_measuring, rank=rank, row_nbytes=FLOAT * (1 + num_steps))
    return seconds + broadcast(num_measuring, rank=rank, row_nbytes=FLOAT * num_figures)


def peers_of_all_gather(num_ranks: int, *, rank: int) -> set[int]:
    """Ranks that it connects to: the neighbours in the ring."""
    return {(rank - 1) % num_ranks, (rank + 1) % num_ranks} - {rank}


def peers_of_largest_row(num_ranks: int, *, rank: int) -> set[int]:
    """Ranks that it connects to: those a power of two above and below."""
    powers = [1 << bit for bit in range((num_ranks - 1).bit_length())]
    return {(rank + sign * power) % num_ranks for power in powers for sign in (1, -1)}


def peers_of_gather(num_ranks: int, *, rank: int) -> set[int]:
    """Ranks that it connects to: the first, and the first to all."""
    return {0} if rank else {*range(1, num_ranks)}


def peers_of_broadcast(num_ranks: int, *, rank: int) -> set[int]:
    """Ranks that it connects to: parent and children in the tree of `broadcast`."""
    powers = [1 << bit for bit in range(num_ranks.bit_length())]
    children = {rank + power for power in powers if rank < power and rank + power < num_ranks}
    return children | ({rank - (1 << rank.bit_length() - 1)} if rank else set())


def sockets(peers_of_groups: Iterable[set[int]]) -> int:
    """TCP sockets of a rank for its gloo groups: one that listens for each, and one to each rank that it has met there.

    Ranks connect when they first meet, as in all groups of this package; with TORCH_GLOO_LAZY_INIT=0, torch's default,
    all ranks of a group are connected when it is made.
    """
    return sum(1 + len(peers) for peers in peers_of_groups)
