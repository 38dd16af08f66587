"""Exchanges that each rank of a test world runs. Arguments and results are plain values: they pass through a pipe."""

import hashlib
import time
from dataclasses import replace
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
from sample_rows import Sample, rows_of, samples_of

from megatron_balance import BalanceError, Forest
from megatron_balance.runtime.comm import exchange_parts
from megatron_balance.runtime.exchange import reroute_samples
from megatron_balance.runtime.failure import Failure, broadcast_step
from megatron_balance.runtime.gather import gather_lengths
from megatron_balance.samples.sample import KeySpec, Samples, SampleSchema
from megatron_balance.samples.shared_prefixes import hash_chains

_NAMES = "bool uint8 int8 int16 int32 int64 float16 bfloat16 float32 float64 complex64 complex128 float8_e4m3fn"
DTYPES = tuple(getattr(torch, name) for name in _NAMES.split())


def random_bits(shape, dtype, rng):
    """Any bits, NaN payloads among them: what arrives is compared as bits."""
    nbytes = int(np.prod(shape)) * dtype.itemsize
    data = rng.integers(0, 2 if dtype is torch.bool else 256, size=nbytes, dtype=np.uint8)
    return torch.from_numpy(data).view(dtype).view(shape) if nbytes else torch.empty(shape, dtype=dtype)


def sample_of(length, rng):
    """Keys of every dtype, of shapes of their own; some samples have no image, some several, of several patches."""
    per_token = {f"t_{dtype}": random_bits((length,), dtype, rng) for dtype in DTYPES}
    per_token["t_matrix"] = random_bits((length, 3, 2), torch.bfloat16, rng)
    per_token["t_nothing"] = random_bits((length, 0), torch.float32, rng)
    per_token["t_strided"] = random_bits((length, 5), torch.int32, rng)[:, ::2]
    per_sample = {f"s_{dtype}": random_bits((), dtype, rng) for dtype in DTYPES}
    per_sample["s_matrix"] = random_bits((2, 3), torch.float64, rng).T
    num_images = int(rng.integers(0, 3)) if length else 0
    num_patches = sum(int(rng.integers(1, 50)) for _ in range(num_images))
    ragged = {
        "pixel_values": random_bits((num_patches, 7), torch.bfloat16, rng),
        "image_grid_thw": random_bits((num_images, 3), torch.int64, rng),
        "audio": random_bits((num_images, 5), torch.uint8, rng)[:, ::2],
    }
    return Sample(per_token, per_sample=per_sample, ragged=ragged)


def checksum(sample):
    """Of keys, dtypes, shapes and bits."""
    digest = hashlib.sha256()
    for name, tensor in sorted(sample.tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        if tensor.numel():
            digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def world():
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def expect_error(call):
    """The message of the BalanceError."""
    try:
        call()
    except BalanceError as error:
        return str(error)
    raise AssertionError("no BalanceError")


def reroute(lengths, destinations, *, copies=None, ranks=None, seed=0):
    """Every sample arrives at its destination, once, with equal bits: the samples of this rank.

    `lengths` is a list for each rank. All ranks draw all samples from one seed, so that each knows what it must get.
    `copies` are the samples that go to the destinations, by default each once; `ranks` a group of some, None outside
    of it.
    """
    group = dist.new_group(ranks) if ranks else world()
    if ranks and dist.get_rank() not in ranks:
        return None
    rng = np.random.default_rng(seed)
    everything = [[sample_of(length, rng) for length in of_rank] for of_rank in lengths]
    flat = [sample for of_rank in everything for sample in of_rank]
    mine = samples_of(everything[group.rank()])
    gathered = gather_lengths(mine, group=group)
    assert gathered.lengths.tolist() == [length for of_rank in lengths for length in of_rank]
    assert gathered.home_ranks.tolist() == [rank for rank, of_rank in enumerate(lengths) for _ in of_rank]
    sample_ids = None if copies is None else np.array(copies)
    ids, samples = reroute_samples(
        mine, sample_ids=sample_ids, destinations=np.array(destinations, int), gathered=gathered, group=group
    )
    sent = zip(copies or range(len(flat)), destinations, strict=True)
    assert ids.tolist() == [sample for sample, to in sent if to == group.rank()]
    for index, sample in zip(ids.tolist(), rows_of(samples), strict=True):
        assert checksum(sample) == checksum(flat[index]), f"sample {index}"
        for tensor in sample.tensors.values():
            assert not tensor.numel() or tensor.data_ptr() % tensor.dtype.itemsize == 0, "misaligned"
    return ids.tolist()


def reroute_random(count):
    """Exchanges of drawn lengths and destinations: the samples that arrived here.

    Among them one without samples, one without tokens, and one in which nothing moves.
    """
    num_ranks, arrived = world().size(), 0
    for seed in range(count):
        rng = np.random.default_rng(seed)
        numbers = rng.integers(0, 7, size=num_ranks) if seed else [0] * num_ranks
        lengths = [rng.integers(0, 1 if seed == 1 else 80, size=n).tolist() for n in numbers]
        destinations = rng.integers(0, num_ranks, size=sum(map(len, lengths))).tolist()
        if seed == 2:
            destinations = [rank for rank, of_rank in enumerate(lengths) for _ in of_rank]
        arrived += len(reroute(lengths, destinations, seed=seed) or ())
    return arrived


def gather_many(num_samples, num_ragged):
    """Many more values on rank 1 than elsewhere."""
    group, keys = world(), [f"ragged_{number:04}" for number in range(num_ragged)]
    numbers = [num_samples if rank == 1 else 2 for rank in range(group.size())]
    tables = [np.arange(number * (1 + num_ragged)).reshape(number, -1) % 7 for number in numbers]
    mine = tables[group.rank()]
    columns = {key: [torch.zeros(size) for size in sizes] for key, sizes in zip(keys, mine[:, 1:].T, strict=True)}
    schema = SampleSchema(tuple(KeySpec(key, dtype=torch.float32, kind="ragged") for key in keys))
    samples = Samples(schema, columns, mine[:, 0])
    gathered = gather_lengths(samples, group=group)
    assert np.array_equal(np.column_stack([gathered.lengths, gathered.ragged_lengths]), np.concatenate(tables))


def exchanged_parts(*, collective):
    """What this rank receives where rank r sends n + 1 entries of value r to rank n, and none to itself."""
    group = world()
    rank, others = group.rank(), [other for other in range(group.size()) if other != group.rank()]
    send_sizes, receive_sizes = {other: other + 1 for other in others}, dict.fromkeys(others, rank + 1)
    send = torch.full((sum(send_sizes.values()),), rank)
    receive = torch.empty(sum(receive_sizes.values()), dtype=torch.int64)
    words = {"group": group, "operation": "numbers", "collective": collective}
    exchange_parts(receive, send, receive_sizes=receive_sizes, send_sizes=send_sizes, **words)
    return receive.tolist()


def message_after_a_later_timeout():
    """Rank 0's error where rank 1 sends it no sample, where the timeout was shortened; whether it came at once."""
    group = dist.new_group(timeout=timedelta(seconds=60))
    gathered = gather_lengths(samples_of([Sample({"tokens": torch.arange(3)})] * group.rank()), group=group)
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=1), group)
    if group.rank():
        return None
    started = time.monotonic()
    error = expect_error(lambda: reroute_samples(samples_of([]), destinations=[0], gathered=gathered, group=group))
    return error, time.monotonic() - started < 30


def share_in_replica(kinds):
    """Each rank of a replica listens, has a problem, or a step with digest 7 or 8."""
    kind = kinds[dist.get_rank()]
    text, digest = ((lambda: f"step {'—' * 9000}"), int(kind)) if kind.isdigit() else (None, 0)
    problem = "the data ended — early" if kind == "problem" else None
    try:
        return broadcast_step(text, group=world(), digest=digest, error=problem)
    except BalanceError as error:
        return str(error)


def one_rank_differs(kind):
    """The error of this rank where rank 1 has samples of another kind, failed, or was started otherwise."""
    group, usual = world(), {"tokens": torch.zeros(3, dtype=torch.int64), "loss_mask": torch.ones(3)}
    others = {
        "dtype": [usual | {"loss_mask": torch.ones(3).double()}],
        "shape": [usual | {"loss_mask": torch.ones(3, 1)}],
        "key": [usual | {"advantages": torch.ones(3)}],
    }
    differs = group.rank() == 1
    if kind == "problem" and differs:
        return expect_error(lambda: gather_lengths(Failure(BalanceError("the file ended — early")), group=group))
    if kind in ("problem", "settings"):
        settings = {"cap": "8"} if differs and kind == "settings" else {}
        return expect_error(lambda: gather_lengths(samples_of([Sample(usual)]), group=group, settings=settings))
    rows = others[kind] if differs else [usual] * (kind != "key" or group.rank() > 0)
    return expect_error(lambda: gather_lengths(samples_of([Sample(row) for row in rows]), group=group))


def samples_of_other_lengths():
    group = world()
    samples, longer = (samples_of([Sample({"tokens": torch.arange(length)})]) for length in (4, 5))
    gathered = gather_lengths(samples, group=group)
    stay = np.arange(group.size())
    return expect_error(lambda: reroute_samples(longer, destinations=stay, gathered=gathered, group=group))


def responses(seed, *, groups, size):
    """Groups of responses to prompts of any length, next tokens as labels, trained from the prompt's last token on."""
    rng, rows = np.random.default_rng(seed), []
    for _ in range(groups):
        prompt = rng.integers(0, 30_000, rng.integers(2, 600))
        for _ in range(size):
            tokens = torch.from_numpy(np.concatenate([prompt, rng.integers(0, 30_000, rng.integers(1, 300))]))
            mask = (torch.arange(len(tokens)) >= prompt.size - 1).float()
            rows.append(Sample({"tokens": tokens, "labels": tokens.roll(-1), "loss_mask": mask}))
    return rows


def forest_of_ranks(numbers):
    """The forest that this rank builds where each has so many of the same twelve samples."""
    starts = np.cumsum([0, *numbers])
    mine = samples_of(responses(7, groups=4, size=3)[starts[dist.get_rank()] : starts[dist.get_rank() + 1]])
    gathered = gather_lengths(replace(mine, chains=hash_chains(mine)), group=world())
    forest = Forest.from_chains(gathered.lengths, gathered.chains)
    return [forest.node_tokens.tolist(), forest.parent.tolist(), forest.node_of.tolist()]
