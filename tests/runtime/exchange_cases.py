"""Functions that each rank of a test world runs. Arguments and results are plain values: they pass through a pipe."""

import dataclasses
import hashlib
import time
from collections import Counter
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.fuzz_exchange import DTYPES, fuzz
from megatron_balance.calibration.online import OnlineCalibration
from megatron_balance.cost.model import CostModel
from megatron_balance.errors import BalanceError
from megatron_balance.runtime import prepared_exchange
from megatron_balance.runtime.collectives import largest_row
from megatron_balance.runtime.exchange import reroute_samples, send_copies
from megatron_balance.runtime.gather import check_same_schedule, gather_lengths, gather_sample_lengths
from megatron_balance.runtime.host_buffers import HostBuffers
from megatron_balance.runtime.prepared_exchange import prepare_exchange
from megatron_balance.runtime.rank_seconds import gather_rank_seconds
from megatron_balance.runtime.replica import Replica, Share
from megatron_balance.samples.sample import Sample, SampleSchema

pair_of_ranks: dist.ProcessGroup | None = None  # made once a process


def random_bits(shape, dtype, rng) -> torch.Tensor:
    """Any bits, NaN payloads among them: what arrives is compared as bits."""
    nbytes = int(np.prod(shape)) * dtype.itemsize
    data = rng.integers(0, 2 if dtype is torch.bool else 256, size=nbytes, dtype=np.uint8)
    return torch.from_numpy(data).view(dtype).view(shape) if nbytes else torch.empty(shape, dtype=dtype)


def segments_of(length):
    """A case gives a sample's length, or a list of those of its sequences."""
    return tuple(length) if isinstance(length, list) else (length,)


def every_dtype_sample(length, rng) -> Sample:
    segments = segments_of(length)
    length = sum(segments)
    per_token = {f"t_{dtype}": random_bits((length,), dtype, rng) for dtype in DTYPES}
    per_token["t_matrix"] = random_bits((length, 3, 2), torch.bfloat16, rng)
    per_token["t_nothing"] = random_bits((length, 0), torch.float32, rng)
    per_token["t_strided"] = random_bits((length, 5), torch.int32, rng)[:, ::2]
    per_sample = {f"s_{dtype}": random_bits((), dtype, rng) for dtype in DTYPES}
    per_sample["s_matrix"] = random_bits((2, 3), torch.float64, rng).T
    return Sample(per_token, per_sample=per_sample, segment_lengths=segments)


def small_sample(length, rng) -> Sample:
    segments = segments_of(length)
    length = sum(segments)
    return Sample(
        {
            "tokens": random_bits((length,), torch.int64, rng),
            "loss_mask": random_bits((length,), torch.float32, rng),
            "flag": random_bits((length,), torch.bool, rng),
        },
        per_sample={"weight": random_bits((), torch.float64, rng)},
        segment_lengths=segments,
    )


def ragged_sample(length, rng) -> Sample:
    """Some samples have no image, some several; patches and images are keys of lengths and dtypes of their own."""
    plain = small_sample(length, rng)
    num_images = int(rng.integers(0, 3)) if plain.length else 0
    num_patches = sum(int(rng.integers(1, 50)) for _ in range(num_images))
    ragged = {
        "pixel_values": random_bits((num_patches, 7), torch.bfloat16, rng),
        "image_grid_thw": random_bits((num_images, 3), torch.int64, rng),
        "audio": random_bits((num_images, 5), torch.uint8, rng)[:, ::2],
    }
    return dataclasses.replace(plain, ragged=ragged)


BUILDERS = {"every_dtype": every_dtype_sample, "small": small_sample, "ragged": ragged_sample}


def checksum(sample: Sample) -> str:
    """Of segments, keys, dtypes, shapes and bits."""
    digest = hashlib.sha256(str(sample.segment_lengths).encode())
    for name, tensor in sorted({**sample.per_token, **sample.per_sample, **sample.ragged}.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        if tensor.numel():
            digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


@contextmanager
def counted_collectives():
    """Counts the collectives that are issued, by name."""
    names = (
        *("all_to_all_single", "all_gather_into_tensor", "all_gather", "all_reduce", "broadcast", "barrier"),
        *("isend", "irecv"),
    )
    originals = {name: getattr(dist, name) for name in names}
    counts: Counter[str] = Counter()

    def counting(name):
        def call(*args, **kwargs):
            counts[name] += 1
            return originals[name](*args, **kwargs)

        return call

    for name in names:
        setattr(dist, name, counting(name))
    try:
        yield counts
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)


def _group(ranks=None) -> dist.ProcessGroup:
    return dist.group.WORLD if ranks is None else dist.new_group(ranks)


def _expect_error(call) -> str:
    """The message of the BalanceError; it must come soon."""
    start = time.monotonic()
    try:
        call()
    except BalanceError as error:
        assert time.monotonic() - start < 10
        return str(error)
    raise AssertionError("no BalanceError")


def reroute(lengths, destinations, builder="small", seed=0, group=None) -> dict:
    """Every sample arrives at its destination, once, with equal bits.

    `lengths` is a list for each rank, whose entries are lengths or lists of them, for samples of several sequences. All
    ranks draw all samples from one seed, so that each knows what it must get.
    """
    group = group or _group()
    rng = np.random.default_rng(seed)
    everything = [[BUILDERS[builder](length, rng) for length in of_rank] for of_rank in lengths]
    flat = [sample for of_rank in everything for sample in of_rank]
    mine = everything[group.rank()]
    with counted_collectives() as counts:
        gathered = gather_sample_lengths(mine, group=group)
        segments = [segments_of(length) for of_rank in lengths for length in of_rank]
        assert gathered.lengths.tolist() == [sum(of_sample) for of_sample in segments]
        assert gathered.num_segments.tolist() == [len(of_sample) for of_sample in segments]
        assert gathered.segment_lengths.tolist() == [length for of_sample in segments for length in of_sample]
        for array in (gathered.lengths, gathered.home_ranks, gathered.num_segments, gathered.segment_lengths):
            assert array.dtype == np.int64
        assert gathered.home_ranks.tolist() == [rank for rank, of_rank in enumerate(lengths) for _ in of_rank]
        assert gathered.offset == sum(len(of_rank) for of_rank in lengths[: group.rank()])
        gather_counts = dict(counts)
        counts.clear()
        arrived = reroute_samples(
            mine, destinations=np.array(destinations, dtype=np.int64), gathered=gathered, group=group
        )
        reroute_counts = dict(counts)
    assert list(arrived) == [index for index, to in enumerate(destinations) if to == group.rank()]
    for index, sample in arrived.items():
        assert checksum(sample) == checksum(flat[index]), f"sample {index}"
        for tensor in (*sample.per_token.values(), *sample.per_sample.values(), *sample.ragged.values()):
            assert not tensor.numel() or tensor.data_ptr() % tensor.dtype.itemsize == 0, "misaligned"
    assert reroute_counts == _messages_of(group.rank(), flat, destinations=destinations, homes=gathered.home_ranks)
    return {"ids": list(arrived), "gather": gather_counts}


def _messages_of(rank, samples, *, destinations, homes) -> dict[str, int]:
    """One to each rank that gets bytes of this one, and one from each whose bytes it gets."""
    pairs = {
        (int(home), to)
        for sample, home, to in zip(samples, homes, destinations, strict=True)
        if home != to and (sample.length or sample.per_sample or any(map(len, sample.ragged.values())))
    }
    counts = {"isend": [home for home, _ in pairs].count(rank), "irecv": [to for _, to in pairs].count(rank)}
    return {name: count for name, count in counts.items() if count}


def stay_on_another_device() -> list:
    """Samples that stay at home are copied to the device that is asked for, with their sequences."""
    group = _group()
    samples = [small_sample(length, np.random.default_rng(0)) for length in ([2, 3], 4)]
    gathered = gather_sample_lengths(samples, group=group)
    here = reroute_samples(samples, destinations=[0, 0], gathered=gathered, group=group, device="meta")
    return [(str(sample.device), sample.segment_lengths) for sample in here.values()]


def exchange_in_kept_buffers(steps) -> list[int]:
    """Of each step all samples go to the next rank, in the buffers of the step before; its receive buffer's address."""
    group, buffers, addresses = _group(), HostBuffers(), []
    for step, lengths in enumerate(steps):
        rng = np.random.default_rng(step)
        everything = [[small_sample(length, rng) for length in of_rank] for of_rank in lengths]
        flat = [sample for of_rank in everything for sample in of_rank]
        mine = everything[group.rank()]
        gathered = gather_sample_lengths(mine, group=group)
        prepared = prepare_exchange(
            mine,
            sample_ids=np.arange(len(flat)),
            destinations=(gathered.home_ranks + 1) % group.size(),
            gathered=gathered,
            group=group,
            buffers=buffers,
        )
        for index, sample in prepared.run(group=group).items():
            assert checksum(sample) == checksum(flat[index]), f"step {step}, sample {index}"
        addresses.append(buffers.take("receive", nbytes=1).data_ptr())
    return addresses


def send_to_several(lengths, copies, seed=0) -> list[int]:
    """Every copy arrives, with equal bits: `copies` lists the ranks that each sample goes to."""
    group, rng = _group(), np.random.default_rng(seed)
    everything = [[small_sample(length, rng) for length in of_rank] for of_rank in lengths]
    flat = [sample for of_rank in everything for sample in of_rank]
    mine = everything[group.rank()]
    pairs = [(sample, rank) for sample, ranks in enumerate(copies) for rank in ranks]
    sample_ids, destinations = np.array(pairs, dtype=np.int64).reshape(-1, 2).T
    gathered = gather_sample_lengths(mine, group=group)
    arrived = send_copies(mine, sample_ids=sample_ids, destinations=destinations, gathered=gathered, group=group)
    for index, sample in arrived.items():
        assert checksum(sample) == checksum(flat[index]), f"sample {index}"
    return list(arrived)


def reroute_in_subgroup(ranks, lengths, destinations) -> dict | None:
    """The ranks outside the group only take part in making it."""
    group = _group(ranks)
    return reroute(lengths, destinations, group=group) if dist.get_rank() in ranks else None


def largest_in_subgroup(ranks) -> list[int] | None:
    """Of rows in which each rank holds the largest of one number."""
    group = _group(ranks)
    if dist.get_rank() not in ranks:
        return None
    row = np.zeros(len(ranks), dtype=np.int64) - 5
    row[group.rank()] = 10 + group.rank()
    return largest_row(row, group=group, what="numbers").tolist()


def message_after_a_later_timeout() -> str | None:
    """Rank 0's error where rank 1 sends nothing, in a group whose timeout was shortened."""
    group = dist.new_group(timeout=timedelta(minutes=10))
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=1), group)
    if group.rank():
        return None
    return _expect_error(lambda: largest_row(np.zeros(1, dtype=np.int64), group=group, what="numbers"))


def fuzz_exchanges(count, seed) -> dict[str, Any]:
    """Random schedules and exchanges."""
    global pair_of_ranks
    if pair_of_ranks is None:
        pairs = [dist.new_group([rank for rank in range(dist.get_world_size()) if rank % 2 == n]) for n in (0, 1)]
        pair_of_ranks = pairs[dist.get_rank() % 2]
    return dataclasses.asdict(fuzz(_group(), pair=pair_of_ranks, count=count, seed=seed))


def fuzz_with_a_flipped_bit(count) -> list[str]:
    """Errors of a rank in rounds where rank 1 flips one bit of its received samples."""
    original = prepared_exchange.read_block

    def altered(block, **keywords):
        samples = original(block, **keywords)
        if samples[-1].length:
            samples[-1].per_token["loss_mask"].view(torch.uint8)[-1] ^= 1
        return samples

    if dist.get_rank() == 1:
        prepared_exchange.read_block = altered
    said = []
    try:
        for seed in range(count):  # one round each: the last collective of a round is before what is compared
            try:
                fuzz(_group(), pair=_group(), count=1, seed=seed)
            except AssertionError as error:
                said.append(str(error))
    finally:
        prepared_exchange.read_block = original
    return said


def share_in_replica(kinds) -> list[int] | str:
    """Each rank listens, plans (`A` or `B`), or has a problem."""
    kind = kinds[dist.get_rank()]
    planned = {"A": ([2, 30, 40], 7), "B": ([2, 30, 40], 8), "C": ([1, 70], 7)}
    counts, digest = planned.get(kind, (None, 0))
    problem = "the data ended — early" if kind == "problem" else None
    try:
        return Replica(firsts=_group()).share(Share(3, counts, digest=digest, problem=problem)).numbers
    except BalanceError as error:
        return str(error)


def gather_many(num_samples) -> dict:
    """More lengths than the header holds, on rank 1 only."""
    group = _group()
    sample = Sample({"tokens": torch.zeros(1, dtype=torch.int64)})
    lengths = np.arange(num_samples if group.rank() == 1 else 2) + 1
    with counted_collectives() as counts:
        gathered = gather_lengths(lengths, group=group, schema=SampleSchema.of(sample))
    expected = [np.arange(num_samples if rank == 1 else 2) + 1 for rank in range(group.size())]
    assert np.array_equal(gathered.lengths, np.concatenate(expected))
    return dict(counts)


def gather_segments(num_segments) -> dict:
    """One sample of many sequences on rank 1, plain ones elsewhere."""
    group = _group()
    sample = Sample({"tokens": torch.zeros(1, dtype=torch.int64)})
    own = (np.arange(num_segments) + 1, [num_segments]) if group.rank() == 1 else ([5, 6], None)
    with counted_collectives() as counts:
        gathered = gather_lengths(own[0], num_segments=own[1], group=group, schema=SampleSchema.of(sample))
    total = num_segments * (num_segments + 1) // 2
    expected = [n for rank in range(group.size()) for n in ([total] if rank == 1 else [5, 6])]
    assert gathered.lengths.tolist() == expected
    return dict(counts)


def schemas_differ(kind) -> str:
    """Rank 1's samples are of another kind."""
    group = _group()
    tokens, loss_mask = torch.zeros(3, dtype=torch.int64), torch.ones(3)
    per_token = {"tokens": tokens, "loss_mask": loss_mask}
    if group.rank() == 1:
        per_token = {
            "dtype": {"tokens": tokens, "loss_mask": loss_mask.double()},
            "key": {"tokens": tokens, "loss_mask": loss_mask, "advantages": loss_mask},
            "shape": {"tokens": tokens, "loss_mask": loss_mask[:, None]},
        }[kind]
    samples = [Sample(per_token)] if group.rank() != 0 or kind != "key" else []
    return _expect_error(lambda: gather_sample_lengths(samples, group=group))


def some_rows_are_not_packed() -> str:
    group = _group()
    sample = Sample({"tokens": torch.zeros(3, dtype=torch.int64)})
    packed = group.rank() != 1
    return _expect_error(lambda: gather_sample_lengths([sample] if packed else [], group=group, packed=packed))


def fingerprints_differ() -> str:
    group = _group()
    fingerprint = 0xBEEF if group.rank() == 1 else 0x7FFFFFFFFFFFFFFF
    return _expect_error(lambda: gather_lengths([], group=group, fingerprint=fingerprint))


def one_rank_has_a_problem(kind) -> str:
    group = _group()
    sample = Sample({"tokens": torch.zeros(3, dtype=torch.int64)})
    schema = SampleSchema.of(sample)
    if group.rank() != 1:
        return _expect_error(lambda: gather_lengths([3], group=group, schema=schema))
    other = Sample({"tokens": torch.zeros(3, dtype=torch.int32)})
    return _expect_error(
        {
            "problem": lambda: gather_lengths([3], group=group, schema=schema, problem="the file ended — early"),
            "mixed": lambda: gather_sample_lengths([sample, other], group=group),
            "negative": lambda: gather_lengths([3, -4], group=group, schema=schema),
            "no schema": lambda: gather_lengths([3], group=group),
            "segments": lambda: gather_lengths([3, 4], group=group, num_segments=[1, 2], schema=schema),
            "no segments": lambda: gather_lengths([3], group=group, num_segments=[0, 1], schema=schema),
        }[kind]
    )


def gather_without_ragged_lengths() -> str:
    group, sample = _group(), Sample({"tokens": torch.zeros(3)}, ragged={"a": torch.zeros(1), "b": torch.zeros(2)})
    return _expect_error(lambda: gather_lengths([3], group=group, schema=SampleSchema.of(sample)))


def schedules_differ() -> str:
    group = _group()
    check_same_schedule(2**63 - 1, group=group)
    digest = 5 if group.rank() in (1, 3) else 6
    return _expect_error(lambda: check_same_schedule(digest, group=group))


def no_rank_has_samples() -> bool:
    group = _group()
    gathered = gather_lengths([], group=group)
    assert gathered.schema is None
    assert gathered.lengths.shape == (0,)
    return reroute_samples([], destinations=np.zeros(0, dtype=np.int64), gathered=gathered, group=group) == {}


def wrong_arguments() -> list[str]:
    group = _group()
    sample = small_sample(4, np.random.default_rng(0))
    gathered = gather_sample_lengths([sample], group=group)
    longer = small_sample(5, np.random.default_rng(0))
    other = Sample({"tokens": sample.per_token["tokens"]})
    cut = Sample(sample.per_token, per_sample=sample.per_sample, segment_lengths=(1, 3))
    stay = np.arange(group.size())

    def rerouting(samples, destinations):
        return lambda: reroute_samples(samples, destinations=destinations, gathered=gathered, group=group)

    return [
        _expect_error(rerouting([sample], stay[:1])),
        _expect_error(rerouting([sample], stay + 1)),
        _expect_error(rerouting([sample], stay - 1)),
        _expect_error(rerouting([longer], stay)),
        _expect_error(rerouting([other], stay)),
        _expect_error(rerouting([cut], stay)),
    ]


def online_calibration(
    *, truth: tuple[float, ...], num_rows: list[int], num_steps: int, length: int | None = None
) -> dict[str, Any]:
    """Measurements known to a rank after some steps; each rank timed other micro-batches, a few of them disturbed."""
    group = _group()
    rng = np.random.default_rng(group.rank())
    calibration = OnlineCalibration(CostModel(linear=1000, quadratic=1), group=group)
    rows = []
    for _ in range(num_rows[group.rank()]):
        lengths = np.array([length or n for n in rng.lognormal(6, 1, 1 if length else rng.integers(1, 12)).round()])
        rows.append([1.0, lengths.size, lengths.sum(), (lengths**2).sum(), 0.0])
    features = np.array(rows).reshape(-1, 5)
    seconds = features[:, :4] @ np.array(truth) * rng.normal(1, 0.005, len(features))
    seconds[::9] *= 3
    calibration.add(features, seconds=seconds)
    for _ in range(num_steps):
        calibration.begin_step()
    if calibration.state.coefficients is None:
        assert calibration.cost_model == calibration.prior
    return dataclasses.asdict(calibration.state)


def rank_seconds(*, dp_ranks: list[int], measured: list[list[float]], dp_size: int) -> list[list[float]] | None:
    """Seconds of every model replica, on the first rank of the group."""
    group = _group()
    gathered = gather_rank_seconds(
        np.array(measured[group.rank()]), dp_rank=dp_ranks[group.rank()], dp_size=dp_size, group=group
    )
    return None if gathered is None else gathered.tolist()
