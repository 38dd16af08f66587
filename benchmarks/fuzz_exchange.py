"""Random schedules and exchanges: no sample may be lost, doubled or altered.

    scripts/fuzz_exchange.sh 10000 SEED

Every rank draws the same lengths and settings from the seed, and the bytes of its own samples from its own. A round
gathers lengths, plans, exchanges, packs what arrived and unpacks it again. Digests over every byte of every key, made
where a sample was loaded, must be those made where it arrived, and those made of what was unpacked.
"""

from __future__ import annotations

import argparse
import hashlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from megatron_balance import CostModel, DataSchedule, Limits, Topology, build_data_schedule
from megatron_balance.planner.objectives import objective_names
from megatron_balance.runtime.collectives import all_gather_row
from megatron_balance.runtime.exchange import reroute_samples
from megatron_balance.runtime.gather import GatheredLengths, check_same_schedule, gather_sample_lengths
from megatron_balance.samples.packing import dummy_microbatch, pack_microbatch
from megatron_balance.samples.sample import Sample
from megatron_balance.samples.unpacking import split_packed

_DTYPES = "bool uint8 int8 int16 int32 int64 float16 bfloat16 float32 float64 complex64 complex128 float8_e4m3fn"
DTYPES: tuple[torch.dtype, ...] = tuple(getattr(torch, name) for name in _DTYPES.split())
ALGORITHMS = ("auto", "karmarkar_karp", "greedy", "first_fit")
MAX_SAMPLES_A_RANK = 7
OVER_LONG = 300


@dataclass
class Tally:
    """Counts of a fuzz on one rank."""

    rounds: int = 0
    samples: int = 0
    moved: int = 0
    nbytes: int = 0
    ragged: int = 0
    sequences: int = 0
    zero_length: int = 0
    over_long: int = 0
    empty_ranks: int = 0
    kinds: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class _Round:
    """The draws of a round, equal on all ranks."""

    lengths: list[list[tuple[int, ...]]]
    token_dtypes: tuple[torch.dtype, ...]
    sample_dtypes: tuple[torch.dtype, ...]
    ragged_dtypes: tuple[torch.dtype, ...]
    matrices: bool
    topology: Topology
    limits: Limits
    objective: str | None
    algorithm: str
    move_samples: bool
    tell_homes: bool
    groups: NDArray[np.int64] | None
    destinations: NDArray[np.int64]


def fuzz(group: dist.ProcessGroup, *, pair: dist.ProcessGroup, count: int, seed: int) -> Tally:
    """Run the rounds on all ranks, every fourth of them within `pair`, a part of the ranks that holds this one."""
    tally = Tally()
    for number in range(count):
        within = pair if number % 4 == 3 else group
        drawn = _draw(np.random.default_rng([seed, number]), num_ranks=within.size())
        # Two parts draw the same lengths, and other bytes.
        rng = np.random.default_rng([seed, number, dist.get_rank()])
        mine = [_sample(segments, drawn, rng) for segments in drawn.lengths[within.rank()]]
        try:
            _one(mine, drawn, group=within, tally=tally)
        except AssertionError as error:
            raise AssertionError(f"round {number} of seed {seed}, rank {dist.get_rank()}: {error}") from error
        tally.rounds += 1
        tally.empty_ranks += not mine
    return tally


def _draw(rng: np.random.Generator, *, num_ranks: int) -> _Round:
    counts = rng.integers(1, MAX_SAMPLES_A_RANK + 1, size=num_ranks) * (rng.random(num_ranks) < 0.85)
    if rng.random() < 0.02:
        counts[:] = 0
    several = rng.random() < 0.4
    lengths = [[_segments(rng, several=several) for _ in range(of_rank)] for of_rank in counts.tolist()]
    planned = rng.random() < 0.75
    cp_size = int(rng.choice([1, 1, 2]))
    by_tokens = rng.random() < 0.8
    move_samples = bool(rng.random() < 0.9)
    num_samples = int(counts.sum())
    grouped = move_samples and rng.random() < 0.25
    return _Round(
        lengths,
        token_dtypes=tuple(DTYPES[i] for i in rng.choice(len(DTYPES), size=rng.integers(0, 4), replace=False)),
        sample_dtypes=tuple(DTYPES[i] for i in rng.choice(len(DTYPES), size=rng.integers(0, 3), replace=False)),
        ragged_dtypes=tuple(DTYPES[i] for i in rng.choice(len(DTYPES), size=rng.integers(0, 3), replace=False)),
        matrices=bool(rng.random() < 0.2),
        topology=Topology(
            num_ranks,
            cp_size=cp_size,
            ep_size=int(rng.choice([1, num_ranks])),
            pp_size=int(rng.choice([1, 2])),
            microbatch_multiple=int(rng.choice([1, 1, 2])),
        ),
        limits=Limits(int(rng.integers(24, 200))) if by_tokens else Limits(micro_batch_size=int(rng.integers(1, 4))),
        objective=str(rng.choice(objective_names())) if planned else None,
        algorithm=str(rng.choice(ALGORITHMS)) if by_tokens else "auto",
        move_samples=move_samples,
        tell_homes=bool(rng.random() < 0.7),
        groups=rng.integers(0, 2 * num_ranks, size=num_samples) if grouped else None,
        destinations=rng.integers(0, num_ranks, size=num_samples),
    )


def _segments(rng: np.random.Generator, *, several: bool) -> tuple[int, ...]:
    """Lengths of a sample's sequences, mostly short; some without a token, some longer than any cap."""
    num = int(rng.integers(1, 5)) if several and rng.random() < 0.5 else 1
    kinds = rng.random(num)
    lengths = np.where(kinds < 0.06, 0, np.where(kinds > 0.97, OVER_LONG, rng.integers(1, 60, size=num)))
    return tuple(lengths.tolist())


def _sample(segments: tuple[int, ...], drawn: _Round, rng: np.random.Generator) -> Sample:
    length = sum(segments)
    loss_mask = rng.choice(np.array([0.0, 0.5, 1.0], dtype=np.float32), size=length)
    ends = np.cumsum(np.array([n for n in segments if n], dtype=np.int64)) - 1
    loss_mask[ends] = 1.0  # else unpacking takes the end for padding
    per_token = {
        "tokens": torch.from_numpy(rng.integers(1, 2**40, size=length)),
        "loss_mask": torch.from_numpy(loss_mask),
    }
    per_token |= {f"token_{dtype}": _bits((length,), dtype, rng) for dtype in drawn.token_dtypes}
    per_sample = {f"sample_{dtype}": _bits((), dtype, rng) for dtype in drawn.sample_dtypes}
    if drawn.matrices:
        per_token |= {
            "matrix": _bits((length, 3, 2), torch.bfloat16, rng),
            "nothing": _bits((length, 0), torch.float32, rng),
            "strided": _bits((length, 5), torch.int32, rng)[:, ::2],
        }
        per_sample["transposed"] = _bits((2, 3), torch.float64, rng).T
    ragged = {f"ragged_{dtype}": _bits((_num_entries(length, rng), 3), dtype, rng) for dtype in drawn.ragged_dtypes}
    return Sample(per_token, per_sample=per_sample, ragged=ragged, segment_lengths=segments)


def _num_entries(length: int, rng: np.random.Generator) -> int:
    """Entries of a ragged key: often none, and none without a token."""
    return int(rng.integers(0, 40)) if length and rng.random() < 0.6 else 0


def _bits(shape: tuple[int, ...], dtype: torch.dtype, rng: np.random.Generator) -> Tensor:
    """Any bits, NaN payloads among them."""
    nbytes = int(np.prod(shape)) * dtype.itemsize
    data = rng.integers(0, 2 if dtype is torch.bool else 256, size=nbytes, dtype=np.uint8)
    return torch.from_numpy(data).view(dtype).view(shape) if nbytes else torch.empty(shape, dtype=dtype)


def digest(tensors: Mapping[str, Tensor], *, segment_lengths: Sequence[int]) -> int:
    """63 bits over segments, keys, dtypes, shapes and every byte."""
    sha = hashlib.sha256(str(tuple(segment_lengths)).encode())
    for name, tensor in sorted(tensors.items()):
        sha.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        if tensor.numel():
            sha.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return int.from_bytes(sha.digest()[:8], "little") >> 1


def _of(sample: Sample) -> int:
    return digest(_tensors(sample), segment_lengths=sample.segment_lengths)


def _tensors(sample: Sample) -> dict[str, Tensor]:
    return {**sample.per_token, **sample.per_sample, **sample.ragged}


def _one(mine: Sequence[Sample], drawn: _Round, *, group: dist.ProcessGroup, tally: Tally) -> None:
    gathered = gather_sample_lengths(mine, group=group)
    everything = [segments for of_rank in drawn.lengths for segments in of_rank]
    assert gathered.lengths.tolist() == [sum(segments) for segments in everything], "lengths"
    schedule = _plan(gathered, drawn) if drawn.objective is not None and everything else None
    if schedule is not None:
        schedule.check()
        check_same_schedule(schedule.digest(), group=group)
    destinations = drawn.destinations if schedule is None else schedule.destinations()

    loaded = np.zeros(MAX_SAMPLES_A_RANK, dtype=np.int64)
    loaded[: len(mine)] = [_of(sample) for sample in mine]
    rows = all_gather_row(loaded, group=group, what="digests")
    expected = rows[gathered.home_ranks, np.arange(len(everything)) - _first_of_home(gathered)]

    arrived = reroute_samples(mine, destinations=destinations, gathered=gathered, group=group)
    assert list(arrived) == np.flatnonzero(destinations == group.rank()).tolist(), "a sample is missing or too many"
    for sample_id, sample in arrived.items():
        assert _of(sample) == expected[sample_id], f"sample {sample_id} was altered"
        tally.moved += int(gathered.home_ranks[sample_id] != group.rank())
        tally.nbytes += sum(tensor.nbytes for tensor in _tensors(sample).values())
        tally.ragged += sum(sample.ragged_lengths)
        tally.zero_length += not sample.length
        tally.over_long += sample.length >= OVER_LONG
    tally.samples += len(arrived)
    slots = [list(arrived)] if schedule is None else [list(slot) for slot in schedule.ranks[group.rank()]]
    assert sorted(sample for slot in slots for sample in slot) == list(arrived), "slots"
    for slot in slots:
        tally.sequences += _pack_and_unpack([arrived[sample] for sample in slot], gathered, topology=drawn.topology)
    if drawn.groups is not None and schedule is not None:
        for one in np.unique(drawn.groups):
            assert np.unique(destinations[drawn.groups == one]).size == 1, "a group was torn apart"
    kind = "random destinations" if schedule is None else f"objective {drawn.objective}"
    kind += "" if drawn.groups is None or schedule is None else " with groups"
    tally.kinds[kind] = tally.kinds.get(kind, 0) + 1


def _plan(gathered: GatheredLengths, drawn: _Round) -> DataSchedule:
    whole = len(gathered.segment_lengths) == len(gathered.lengths)
    return build_data_schedule(
        gathered.segment_lengths,
        num_segments=None if whole else gathered.num_segments,
        cost_model=CostModel(linear=100, quadratic=1),
        topology=drawn.topology,
        limits=drawn.limits,
        objective=drawn.objective or "auto",
        algorithm=drawn.algorithm,
        groups=drawn.groups,
        home_ranks=gathered.home_ranks if drawn.tell_homes or not drawn.move_samples else None,
        move_samples=drawn.move_samples,
    )


def _first_of_home(gathered: GatheredLengths) -> NDArray[np.int64]:
    """Id of the first sample of each sample's home."""
    counts = gathered.num_samples_per_rank
    return np.repeat(np.cumsum(counts) - counts, counts)


def _pack_and_unpack(samples: Sequence[Sample], gathered: GatheredLengths, *, topology: Topology) -> int:
    """The number of sequences of a micro-batch that unpacking returned unchanged."""
    token_multiple, cp_size = topology.token_multiple, topology.cp_size
    if not samples:
        if gathered.schema is not None:
            dummy = dummy_microbatch(gathered.schema, token_multiple=token_multiple, cp_size=cp_size)
            assert not dummy["loss_mask"].any(), "a dummy is trained on"
        return 0
    # A row of several sequences has no place for what a sample has once; nor do shapes distinguish a small matrix from
    # tokens.
    single = all(len(sample.segment_lengths) == 1 for sample in samples)
    kept = [name for name, tensor in samples[0].per_sample.items() if single and not tensor.dim()]
    samples = [
        Sample(
            sample.per_token,
            per_sample={name: sample.per_sample[name] for name in kept},
            ragged=sample.ragged if single else {},
            segment_lengths=sample.segment_lengths,
        )
        for sample in samples
    ]
    went_in = [digest_of for sample in samples for digest_of in _sequences(sample)]
    batch = pack_microbatch(samples, token_multiple=token_multiple, cp_size=cp_size)
    if not went_in:
        assert not batch["loss_mask"].any(), "a dummy is trained on"
        return 0
    names = {*samples[0].per_token, *kept, *samples[0].ragged}
    came_out = [
        digest(
            {name: tensor for name, tensor in _tensors(piece).items() if name in names},
            segment_lengths=(piece.length,),
        )
        for piece in split_packed(batch)
    ]
    assert came_out == went_in, "a sequence was altered by packing"
    return len(went_in)


def _sequences(sample: Sample) -> list[int]:
    """Digests of the sequences that have tokens."""
    digests: list[int] = []
    start = 0
    for length in sample.segment_lengths:
        if length:
            piece = {name: tensor[start : start + length] for name, tensor in sample.per_token.items()}
            digests.append(digest({**piece, **sample.per_sample, **sample.ragged}, segment_lengths=(length,)))
        start += length
    return digests


def main() -> None:
    """Fuzz as one of torchrun's ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("count", type=int, help="rounds")
    parser.add_argument("seed", type=int)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    size = dist.get_world_size()
    pairs = [dist.new_group([rank for rank in range(size) if rank % 2 == parity]) for parity in (0, 1)]
    world = dist.group.WORLD
    assert world is not None, "just made"
    started = time.process_time()
    tally = fuzz(world, pair=pairs[dist.get_rank() % 2], count=chosen.count, seed=chosen.seed)
    names = ("samples", "moved", "nbytes", "ragged", "sequences", "zero_length", "over_long", "empty_ranks")
    seconds = [time.process_time() - started]
    totals = torch.tensor([*(float(getattr(tally, name)) for name in names), *seconds], dtype=torch.float64)
    dist.all_reduce(totals)
    if dist.get_rank() == 0:
        *figures, cpu_seconds = totals.tolist()
        said = ", ".join(f"{name} {int(value)}" for name, value in zip(names, figures, strict=True))
        print(f"{tally.rounds} rounds on {size} ranks, seed {chosen.seed}: {said}; none lost, doubled or altered")
        print("rounds of rank 0 by kind: " + ", ".join(f"{kind} {n}" for kind, n in sorted(tally.kinds.items())))
        print(f"CPU seconds of all ranks: {cpu_seconds:.1f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
