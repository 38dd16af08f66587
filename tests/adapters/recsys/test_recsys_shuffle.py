"""R31: rows of the real torchrec moved between real gloo processes: batches of which every value names its origin.

What is installed for it, in a double of recsys-examples, is checked first and undone in the end.
"""

from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
import torch.distributed as dist
from commons.distributed.batch_shuffler import BaseTaskBalancedBatchShuffler
from commons.distributed.batch_shuffler_factory import BatchShufflerFactory
from commons.perf_model.task_estimator import HSTUAttentionTask, SelfAttentionTask
from gloo_ranks import run_ranks
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from megatron_balance import BalanceError
from megatron_balance.adapters import recsys

HSTU_4_HEADS_OF_256 = (30 * 1024**2 + 6 * 1024, 7 * 1024)
"""Linear and quadratic FLOPs of a token: 4 projections and one back, 2 FLOPs a weight, 3 passes; 2 FLOPs a head's
channel in causal attention, 3.5 passes; an output layer of one row."""

# What the ranks run --------------------------------------------------------------------------------------------------


@dataclass
class SmallBatch:
    """A batch of every kind of field: keys with and without weights, dense ones of one and of several entries a row."""

    features: KeyedJaggedTensor
    batch_size: int
    labels: KeyedJaggedTensor | None = None
    actual_batch_size: int | None = None
    user: torch.Tensor | None = None
    scores: torch.Tensor | None = None
    names: list[str] = field(default_factory=list)
    item_feature_name: str = "item"
    history_feature_name: str = "item"


def make_batch(item_lengths, *, rank, batch_size):
    """A batch of real rows with these many items, then padding. Values count up from 10**6 a rank."""
    num_rows = len(item_lengths)
    rng = np.random.default_rng(rank)
    lengths = np.zeros((3, batch_size), dtype=np.int64)
    lengths[0, :num_rows] = lengths[1, :num_rows] = item_lengths
    lengths[2, :num_rows] = rng.integers(0, 3, num_rows)
    label_lengths = np.zeros(batch_size, dtype=np.int64)
    label_lengths[:num_rows] = rng.integers(0, 4, num_rows)
    first = (rank + 1) * 10**6
    features = KeyedJaggedTensor.from_lengths_sync(
        keys=["item", "action", "context"],
        values=torch.arange(first, first + lengths.sum()),
        weights=torch.arange(first, first + lengths.sum(), dtype=torch.float64) / 2,
        lengths=torch.from_numpy(lengths.reshape(-1)).to(torch.int32),
    )
    labels = KeyedJaggedTensor.from_lengths_sync(
        keys=["label"],
        values=torch.arange(first, first + label_lengths.sum(), dtype=torch.float32),
        lengths=torch.from_numpy(label_lengths),
    )
    real = torch.arange(batch_size) < num_rows
    return SmallBatch(
        features=features,
        batch_size=batch_size,
        labels=labels,
        actual_batch_size=num_rows,
        user=torch.arange(first, first + 3 * batch_size).view(batch_size, 3) * real[:, None],
        scores=(torch.arange(first, first + 2 * batch_size).view(-1, 2) * real[:, None]).flatten().to(torch.bfloat16),
        names=["kept"],
    )


def rows_of(batch):
    """The real rows as plain tuples: equal where every value, weight and dense entry is."""
    columns = []
    for kjt in (batch.features, batch.labels):
        for key in kjt.keys():  # noqa: SIM118  # it is no mapping
            jagged = kjt[key]
            sizes = jagged.lengths().tolist()
            columns.append([tuple(piece.tolist()) for piece in jagged.values().split(sizes)])
            if jagged.weights_or_none() is not None:
                columns.append([tuple(piece.tolist()) for piece in jagged.weights().split(sizes)])
    columns.append([tuple(row) for row in batch.user.tolist()])
    columns.append([tuple(row) for row in batch.scores.view(-1, 2).tolist()])
    return list(zip(*columns, strict=False))[: batch.actual_batch_size]


def shuffle(item_lengths, *, batch_size, asynchronous=False):
    """Shuffles this rank's batch both ways: rows before and after, with what came with them."""
    rank = dist.get_rank()
    recsys.install()
    batch = make_batch(item_lengths[rank], rank=rank, batch_size=batch_size)
    shuffler = BatchShufflerFactory.create("megatron_balance", num_heads=4, head_dim=256)
    outcome = {"before": rows_of(batch)}
    for way in ("all_gather", "all_to_all"):
        options = {"return_indices": True, "return_workloads": True, "use_all2all": way == "all_to_all"}
        shuffled, indices, row_workloads = shuffler.shuffle(batch, dist.group.WORLD, **options)
        if asynchronous:
            # Two under way: the second is finished first.
            handles = [shuffler.start_shuffle_async(batch, dist.group.WORLD) for _ in range(2)]
            second = shuffler.finish_shuffle(batch, handles[1], dist.group.WORLD, way == "all_to_all")
            shuffled = shuffler.finish_shuffle(batch, handles[0], dist.group.WORLD, way == "all_to_all")
            assert rows_of(second) == rows_of(shuffled)
        assert torch.equal(row_workloads, shuffler.get_workloads(shuffled))
        outcome[way] = {
            "rows": rows_of(shuffled),
            "indices": indices.tolist(),
            "workloads": row_workloads.tolist(),
            "batch_size": shuffled.batch_size,
            "actual_batch_size": shuffled.actual_batch_size,
            "user": tuple(shuffled.user.shape),
            "scores": (tuple(shuffled.scores.shape), str(shuffled.scores.dtype)),
            "lengths": (shuffled.features.lengths().numel(), str(shuffled.features.lengths().dtype)),
            "names": shuffled.names,
        }
    return outcome


def shuffle_what_one_rank_spoils(item_lengths, *, batch_size, fault):
    """The error of this rank, where rank 1's batch is not fit to be shuffled."""
    rank = dist.get_rank()
    recsys.install()
    batch = make_batch(item_lengths[rank], rank=rank, batch_size=batch_size)
    if rank == 1 and fault == "dense":
        batch.user = batch.user[:-1]
    elif rank == 1 and fault == "rows":
        batch = make_batch(item_lengths[rank], rank=rank, batch_size=batch_size + 1)
    shuffler = BatchShufflerFactory.create("megatron_balance")
    if rank == 1 and fault == "workloads":
        shuffler.get_workloads = lambda batch: torch.ones(batch.batch_size + 1)
    try:
        shuffler.shuffle(batch, dist.group.WORLD)
    except BalanceError as error:
        return str(error)
    return ""


def shuffle_by_upstreams_own_class(item_lengths, *, batch_size):
    """A shuffler as upstream writes them, with workloads of its task: after install, its methods are ours."""
    rank = dist.get_rank()

    class SidShuffler(BaseTaskBalancedBatchShuffler):
        def get_workloads(self, batch):
            return SelfAttentionTask().get_workloads(batch.features["item"].lengths(), 4, 256)

    shuffler = SidShuffler()
    installed = recsys.install()
    batch = make_batch(item_lengths[rank], rank=rank, batch_size=batch_size)
    _, row_workloads = shuffler.shuffle(batch, dist.group.WORLD, return_workloads=True)
    installed.undo()
    try:
        shuffler.shuffle(batch, dist.group.WORLD)
    except NotImplementedError as error:
        return row_workloads.tolist(), str(error)
    return row_workloads.tolist(), "not undone"


# What comes of it ----------------------------------------------------------------------------------------------------


def ranks(num_ranks, case, **arguments):
    """Runs a function of this file on the ranks."""
    return run_ranks(num_ranks, f"test_recsys_shuffle:{case}", **arguments)


def check_everything_is_kept(outcomes, *, batch_size):
    """All rows once, in the order that the indices say, the same whichever way they travelled."""
    before = [row for outcome in outcomes for row in outcome["before"]]
    after = [row for outcome in outcomes for row in outcome["all_gather"]["rows"]]
    assert Counter(after) == Counter(before)
    by_position = {}
    for rank, outcome in enumerate(outcomes):
        by_position |= {rank * batch_size + local: row for local, row in enumerate(outcome["before"])}
    for outcome in outcomes:
        assert outcome["all_gather"] == outcome["all_to_all"]
        new = outcome["all_gather"]
        real, padding = new["indices"][: new["actual_batch_size"]], new["indices"][new["actual_batch_size"] :]
        assert [by_position[position] for position in real] == new["rows"]
        assert real == sorted(real)
        assert padding == sorted(padding)
        assert not by_position.keys() & set(padding)
        assert new["batch_size"] == batch_size
    everywhere = sorted(position for outcome in outcomes for position in outcome["all_gather"]["indices"])
    assert everywhere == list(range(len(outcomes) * batch_size))


@pytest.mark.parametrize("item_lengths", [[[5, 0, 2, 9], [1, 1, 30, 4]], [[5, 0, 2], [1]]])
def test_r29_dense_tensors_hold_real_rows_alone_and_keys_all(item_lengths):
    """R20, R21: one batch type; labels are a KeyedJaggedTensor, scores a tensor of several entries a row."""
    outcomes = ranks(2, "shuffle", item_lengths=item_lengths, batch_size=4)
    check_everything_is_kept(outcomes, batch_size=4)
    for outcome in outcomes:
        new = outcome["all_to_all"]
        assert new["user"] == (new["actual_batch_size"], 3)
        assert new["scores"] == ((2 * new["actual_batch_size"],), "torch.bfloat16")
        assert new["lengths"] == (12, "torch.int32")
        assert new["names"] == ["kept"]


@pytest.mark.parametrize(
    "item_lengths",
    [
        pytest.param([[5, 1, 2, 9, 4], [3, 3, 3], [], [7, 8]], id="ten rows, four ranks (R27)"),
        pytest.param([[5, 0, 2, 9, 4], [0, 3, 3], [1], [7, 0]], id="real rows without tokens (R26)"),
        pytest.param([[], [6], [], []], id="fewer rows than ranks"),
        pytest.param([[], [], [], []], id="no row at all"),
        pytest.param([[0] * 5, [0] * 5, [0] * 5, [0] * 4], id="no tokens at all"),
        pytest.param([[9000], [1] * 5, [1] * 5, [1] * 5], id="one row outweighs all"),
    ],
)
def test_batches_of_any_filling(item_lengths):
    outcomes = ranks(4, "shuffle", item_lengths=item_lengths, batch_size=5)
    check_everything_is_kept(outcomes, batch_size=5)
    num_rows = sum(map(len, item_lengths))
    assert sum(outcome["all_gather"]["actual_batch_size"] for outcome in outcomes) == num_rows


def test_r28_padding_costs_nothing():
    outcomes = ranks(2, "shuffle", item_lengths=[[10] * 6, [10] * 2], batch_size=8)
    assert [outcome["all_gather"]["actual_batch_size"] for outcome in outcomes] == [4, 4]
    assert [sum(outcome["all_gather"]["workloads"][4:]) for outcome in outcomes] == [0, 0]


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_r19_loads_of_hstu_within_a_thousandth(num_ranks):
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(5, 1, (num_ranks, 128)), 0, 4096).astype(int).tolist()
    outcomes = ranks(num_ranks, "shuffle", item_lengths=lengths, batch_size=128)
    check_everything_is_kept(outcomes, batch_size=128)
    linear, quadratic = HSTU_4_HEADS_OF_256

    def load(rank_items):
        return sum(linear * 2 * items + quadratic * (2 * items) ** 2 for items in rank_items)

    loads = [load([len(row[0]) for row in outcome["all_gather"]["rows"]]) for outcome in outcomes]
    assert max(loads) <= 1.001 * sum(loads) / num_ranks
    before = list(map(load, lengths))
    assert max(before) > 1.01 * sum(before) / num_ranks


def test_r25_int32_lengths_do_not_wrap():
    """HSTU: four projections (QKVU), and one back."""
    outcomes = ranks(2, "shuffle", item_lengths=[[2048, 4096], [1, 2]], batch_size=2)
    linear, quadratic = HSTU_4_HEADS_OF_256
    expected = sorted(linear * tokens + quadratic * tokens**2 for tokens in (4096, 8192, 2, 4))
    assert sorted(cost for outcome in outcomes for cost in outcome["all_gather"]["workloads"]) == expected


def test_in_two_halves_with_two_batches_under_way():
    lengths = np.random.default_rng(3).integers(0, 50, (2, 16)).tolist()
    outcomes = ranks(2, "shuffle", item_lengths=lengths, batch_size=16, asynchronous=True)
    check_everything_is_kept(outcomes, batch_size=16)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("dense", "rank 1 failed: RuntimeError: shape '[4, 0, 3]' is invalid"),
        ("workloads", "rank 1 failed: RuntimeError: shape '[4]' is invalid"),
        ("rows", "batch_size is 4 on ranks 0, 2 and 5 on rank 1"),
    ],
)
def test_what_is_wrong_on_one_rank_is_raised_on_all(fault, message):
    lengths = [[1, 2, 3, 4]] * 3
    errors = ranks(3, "shuffle_what_one_rank_spoils", item_lengths=lengths, batch_size=4, fault=fault)
    assert all(message in error for error in errors), errors


def test_r25_shufflers_of_upstream_are_driven_and_given_back():
    """SID-GR: three projections, one back, and an MLP of four times the width."""
    outcomes = ranks(2, "shuffle_by_upstreams_own_class", item_lengths=[[4096, 8192], [1, 2]], batch_size=2)
    linear, quadratic = 72 * 1024**2 + 6 * 1024, 7 * 1024
    expected = sorted(linear * tokens + quadratic * tokens**2 for tokens in (4096, 8192, 1, 2))
    assert sorted(cost for workloads, _ in outcomes for cost in workloads) == expected
    assert [error for _, error in outcomes] == ["upstream's shuffle"] * 2


# Installing: checked, whole and undone -------------------------------------------------------------------------------

HOOKED = [
    (BaseTaskBalancedBatchShuffler, "shuffle"),
    (BaseTaskBalancedBatchShuffler, "start_shuffle_async"),
    (BaseTaskBalancedBatchShuffler, "finish_shuffle"),
    (HSTUAttentionTask, "get_workloads"),
    (SelfAttentionTask, "get_workloads"),
]


def functions():
    return [vars(owner)[name] for owner, name in HOOKED]


def test_switched_off_the_name_is_made_by_the_same_configuration(monkeypatch):
    monkeypatch.setenv("MEGATRON_BALANCE", "0")
    recsys.install()
    try:
        shuffler = BatchShufflerFactory.create("megatron_balance", num_heads=4, head_dim=256)
        assert type(shuffler).shuffle is BaseTaskBalancedBatchShuffler.shuffle
        assert not recsys.is_installed()
    finally:
        BatchShufflerFactory.unregister("megatron_balance")


def test_everything_is_hooked_and_given_back():
    """R18, R24: one name in upstream's factory, beside the identity shuffler, which stays what it is."""
    before = functions()
    installed = recsys.install()
    try:
        assert recsys.is_installed()
        assert recsys.install() is installed
        assert not set(before) & set(functions())
        shuffler = BatchShufflerFactory.create("megatron_balance", num_heads=2, head_dim=8, action_interleaved=False)
        assert isinstance(shuffler, BaseTaskBalancedBatchShuffler)
        assert not shuffler.action_interleaved
        assert BatchShufflerFactory.create("identity").shuffle(before) is before
        with pytest.raises(BalanceError, match="model is 'bert': it must be one of hstu, sid_gr"):
            BatchShufflerFactory.create("megatron_balance", model="bert")
    finally:
        installed.undo()
    assert functions() == before
    assert not recsys.is_installed()
    assert not BatchShufflerFactory.is_registered("megatron_balance")
