"""Samples that wait, in files: whole, of one save, and the same batches on any number of ranks."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_balance import BalanceError, CostModel, Topology
from megatron_balance.files.atomic_write import atomic_write
from megatron_balance.mcore.lookahead import pool_files
from megatron_balance.mcore.lookahead.sample_pool import SamplePool
from megatron_balance.runtime.gathered import GatheredLengths
from megatron_balance.samples.sample import Sample, SampleSchema

WINDOW, BATCH_SIZE = 3, 4
LENGTHS = np.random.default_rng(5).integers(1, 6, size=12 * BATCH_SIZE).tolist()
"""Many are equal, so that ties decide."""


def sample(row: int) -> Sample:
    """A row of the data set, which its tokens tell."""
    return Sample({"tokens": torch.full((LENGTHS[row],), row)})


def pools(num_ranks: int) -> list[SamplePool]:
    topology, cost_model = Topology(num_ranks), CostModel(linear=10, quadratic=1)
    return [
        SamplePool(WINDOW, global_batch_size=BATCH_SIZE, topology=topology, cost_model=cost_model, rank=rank)
        for rank in range(num_ranks)
    ]


def load(ranks: list[SamplePool], *, first_row: int, num_rows: int) -> None:
    """Rows as Megatron's loader deals them out: one to each rank in turn."""
    num_ranks = len(ranks)
    of_rank = [list(range(first_row + rank, first_row + num_rows, num_ranks)) for rank in range(num_ranks)]
    lengths = np.array([LENGTHS[row] for rows in of_rank for row in rows], dtype=np.int64)
    counts = np.array([len(rows) for rows in of_rank])
    for rank, pool in enumerate(ranks):
        samples = [sample(row) for row in of_rank[rank]]
        gathered = GatheredLengths(
            lengths=lengths,
            home_ranks=np.repeat(np.arange(num_ranks), counts),
            num_samples_per_rank=counts,
            offset=int(counts[:rank].sum()),
            schema=SampleSchema.shared_by(samples) if samples else None,
            num_segments=np.ones_like(lengths),
            segment_lengths=lengths,
        )
        pool.add(gathered, samples)


def steps(ranks: list[SamplePool], *, num_steps: int, next_row: int) -> list[list[int]]:
    """Rows of each step."""
    taken: list[list[int]] = []
    for _ in range(num_steps):
        num_rows = ranks[0].num_missing_batches * BATCH_SIZE
        load(ranks, first_row=next_row, num_rows=min(num_rows, max(len(LENGTHS) - next_row, 0)))
        next_row += num_rows
        samples = [each for pool in ranks for each in pool.take()[1]]
        taken.append(sorted(int(each.per_token["tokens"][0]) for each in samples))
    return taken


def save(ranks: list[SamplePool], folder: Path) -> None:
    for pool in ranks:
        pool.save(folder)


@pytest.mark.parametrize("ranks_after", [1, 2, 4])
@pytest.mark.parametrize("saved_after", [1, 5, 11])
def test_batches_are_the_same_on_other_ranks(tmp_path: Path, saved_after: int, ranks_after: int) -> None:
    whole = steps(pools(2), num_steps=12, next_row=0)
    assert sorted(row for rows in whole for row in rows) == list(range(len(LENGTHS)))
    first, resumed = pools(2), pools(ranks_after)
    assert steps(first, num_steps=saved_after, next_row=0) == whole[:saved_after]
    save(first, tmp_path)
    for pool in resumed:
        pool.restore(tmp_path)
    next_row = (saved_after + resumed[0].num_batches_ahead) * BATCH_SIZE
    assert steps(resumed, num_steps=12 - saved_after, next_row=next_row) == whole[saved_after:]


def test_a_run_that_had_ended_goes_on_with_more_data(tmp_path: Path) -> None:
    ended = pools(2)
    load(ended, first_row=0, num_rows=2 * BATCH_SIZE)  # fewer than were missing: the data has ended
    for pool in ended:
        pool.take()
        pool.take()
    save(ended, tmp_path)
    more = pools(4)
    for pool in more:
        pool.restore(tmp_path)
    rest = steps(more, num_steps=10, next_row=2 * BATCH_SIZE)
    assert sorted(row for rows in rest for row in rows) == list(range(2 * BATCH_SIZE, len(LENGTHS)))


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """Two saves, of one step each: `old` and `new`."""
    ranks = pools(2)
    for name, next_row in (("old", 0), ("new", WINDOW * BATCH_SIZE)):
        steps(ranks, num_steps=1, next_row=next_row)
        save(ranks, tmp_path / name)
    return tmp_path


def refused(folder: Path, *, because: str) -> None:
    with pytest.raises(BalanceError, match=f"{because}.*--ckpt-step.*delete"):
        pools(2)[0].restore(folder)


def test_shares_of_two_saves_are_not_mixed(saved: Path) -> None:
    shutil.copy(saved / "old" / "pool_rank00001.npz", saved / "new")
    refused(saved / "new", because="of different saves")


@pytest.mark.parametrize("share", [0, 1])
def test_a_share_that_is_missing_or_cut_is_refused(saved: Path, share: int) -> None:
    path = saved / "new" / f"pool_rank{share:05d}.npz"
    os.truncate(path, path.stat().st_size // 2)
    refused(saved / "new", because="is damaged")
    path.unlink()
    refused(saved / "new", because="is missing")


def test_bytes_that_changed_are_refused(saved: Path) -> None:
    path = saved / "new" / "pool_rank00000.npz"
    content = bytearray(path.read_bytes())
    content[content.index(b"block.npy") + 200] ^= 1
    path.write_bytes(content)
    refused(saved / "new", because="is damaged")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("look_ahead", np.frombuffer(b"[" * 100_000, dtype=np.uint8)),
        ("look_ahead", np.frombuffer(b"[1]", dtype=np.uint8)),
        ("look_ahead", np.frombuffer(b'{"arrivals": ["a"]}', dtype=np.uint8)),
        ("schema", np.frombuffer(b'[["tokens", "os", [], 5]]', dtype=np.uint8)),
        ("schema", np.frombuffer(b"[[]]", dtype=np.uint8)),
        ("num_shares", np.array("many")),
        ("num_segments", np.full(3, 10**15)),
        ("segment_lengths", np.full(3, -1)),
        ("arrivals", np.array([{}], dtype=object)),
        ("block", np.zeros(1, dtype=np.uint8)),
        ("block", np.array(["text"])),
    ],
)
def test_a_share_made_to_harm_is_refused(saved: Path, name: str, value: np.ndarray) -> None:
    path = saved / "new" / "pool_rank00000.npz"
    with np.load(path) as share:
        arrays = dict(share)
    np.savez(path, **{**arrays, name: value})
    with pytest.raises(BalanceError):
        pools(2)[0].restore(saved / "new")


def test_another_format_is_refused(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_files, "FORMAT", 2)
    refused(saved / "new", because="another version")


def test_what_is_half_written_is_not_there(tmp_path: Path) -> None:
    path = tmp_path / "pool_rank00000.npz"

    def fail() -> None:
        with atomic_write(path) as file:
            file.write(b"half")
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        fail()
    assert not pool_files.has_pool(tmp_path)
    with atomic_write(path) as file:
        file.write(b"whole")
    assert path.read_bytes() == b"whole"
    assert [one.name for one in tmp_path.iterdir()] == [path.name]


def test_shares_of_more_ranks_are_forgotten(saved: Path) -> None:
    pool_files.forget_shares(saved / "new", from_rank=1)
    assert [path.name for path in (saved / "new").glob("pool*")] == ["pool_rank00000.npz"]
    pool_files.forget_shares(saved / "new", from_rank=0)
    assert not pool_files.has_pool(saved / "new")


def test_samples_with_ragged_keys_do_not_wait() -> None:
    (pool,) = pools(1)
    lengths = np.full(BATCH_SIZE, 2)
    gathered = GatheredLengths(
        lengths=lengths,
        home_ranks=np.zeros_like(lengths),
        num_samples_per_rank=np.array([BATCH_SIZE]),
        offset=0,
        schema=None,
        num_segments=np.ones_like(lengths),
        segment_lengths=lengths,
        ragged_lengths=np.ones((BATCH_SIZE, 1), dtype=np.int64),
    )
    with pytest.raises(BalanceError, match=r"--balance-lookahead 3 .*ragged keys.*set --balance-lookahead 1"):
        pool.add(gathered, [])
