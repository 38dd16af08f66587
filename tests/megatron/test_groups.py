"""The package's process groups, in Megatron's own layouts, and that every rank makes all of them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from forked_runs import train
from megatron.core import parallel_state
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron_balance.mcore.setup.groups import is_first_of_replica, ranks_of_tensor_rank

FLAGS = (
    "--hidden-size 32 --num-attention-heads 4 --num-query-groups 2 --ffn-hidden-size 64 --seq-length 256 "
    "--max-position-embeddings 256 --train-iters 5 --global-batch-size 8"
)
BALANCED = "--use-dynamic-batch-size --max-tokens-per-gpu 512 --balance-data --balance-by-flops"

WORLD_SIZE = 16
TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])
PACKAGE = Path(__file__).parents[2] / "megatron_balance"


@pytest.fixture
def no_groups_are_left() -> Iterator[None]:
    yield
    parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.usefixtures("no_groups_are_left")
@pytest.mark.parametrize(
    ("tp", "pp", "cp", "order"),
    [
        *((tp, pp, cp, "tp-cp-ep-dp-pp") for tp, pp, cp in ((1, 1, 1), (2, 2, 2), (1, 4, 2), (4, 1, 2), (1, 1, 4))),
        *((tp, pp, 1, "tp-cp-ep-pp-dp") for tp, pp in ((1, 4), (2, 2))),  # Megatron refuses it with cp
    ],
)
def test_a_replica_is_the_ranks_of_one_data_parallel_rank(tp: int, pp: int, cp: int, order: str) -> None:
    of_place: dict[tuple[int, int], list[int]] = {}
    found: dict[int, tuple[tuple[int, int], list[int]]] = {}
    firsts: list[int] = []
    for rank in range(WORLD_SIZE):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=WORLD_SIZE)
        parallel_state.initialize_model_parallel(
            tp, pp, context_parallel_size=cp, order=order, create_gloo_process_groups=False
        )
        place = parallel_state.get_data_parallel_rank(), parallel_state.get_tensor_model_parallel_rank()
        of_place.setdefault(place, []).append(rank)
        found[rank] = place, ranks_of_tensor_rank()
        if is_first_of_replica():
            firsts.append(rank)
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
    for rank, (place, ranks) in found.items():
        assert ranks == of_place[place], f"rank {rank}"
        assert len(ranks) == pp * cp
    assert firsts == sorted(ranks[0] for (_, tp_rank), ranks in of_place.items() if tp_rank == 0)


TP2, PP2, CP2 = (f"--{kind}-parallel-size 2" for kind in ("tensor-model", "pipeline-model", "context"))


@pytest.mark.parametrize(
    ("flags", "num_ranks"),
    [
        pytest.param("", 2, id="DP2"),
        pytest.param(f"{PP2} {TP2}", 8, id="TP2-PP2-DP2"),
        pytest.param(f"{PP2} {TP2} --use-tp-pp-dp-mapping", 8, id="TP2-PP2-DP2-tp-pp-dp"),
        pytest.param(f"{TP2} {PP2} {CP2}", 16, id="TP2-PP2-CP2-DP2"),
        pytest.param(f"{TP2} --pipeline-model-parallel-size 4", 16, id="TP2-PP4-DP2"),
        pytest.param(f"{PP2} --expert-model-parallel-size 2", 8, id="EP2-PP2-DP4"),
        pytest.param(
            f"{TP2} --num-distributed-optimizer-instances 2",
            8,
            id="TP2-DP4-two-optimizer-instances",
            marks=pytest.mark.skipif(find_spec("einops") is None, reason="Megatron needs einops for it"),
        ),
    ],
)
def test_groups_are_those_of_megatron_and_later_ones_meet(tmp_path: Path, flags: str, num_ranks: int) -> None:
    ran = train(tmp_path, flags.split(), num_ranks=num_ranks, module="group_ranks", timeout_seconds=120)
    rows = [rank[0] for rank in ran.ranks]
    readers = [rank for rank, row in enumerate(rows) if row["tensor_rank"] == 0]
    for rank, row in enumerate(rows):
        firsts = [other for other in readers if rows[other]["data_rank"] == row["data_rank"]]
        assert row["data"] == (row["megatron_data"] if row["loads"] else None)
        assert row["firsts"] == (firsts if rank in firsts and len(firsts) > 1 else None)
        assert row["tensor"] == (row["megatron_tensor"] if len(row["megatron_tensor"]) > 1 else None)
        assert row["loads"] == (rank in readers and row["stage"] in (0, max(one["stage"] for one in rows)))
        assert row["readers"] == (readers if rank in readers else None)
        # One socket listens. Before 2.8 torch connects all ranks of a group when it is made.
        assert row["more_sockets"] == (1 if TORCH >= (2, 8) else num_ranks)
        assert row["later"] == ([0, num_ranks - 1] if rank in (0, num_ranks - 1) else None)


@pytest.mark.parametrize(
    ("flags", "num_ranks", "local_world_sizes", "expected"),
    [
        pytest.param("", 8, "4", 4, id="DP8"),
        pytest.param("", 8, "8", None, id="one-node"),
        pytest.param("", 6, "4", None, id="a-node-that-is-half-full"),
        pytest.param("", 8, "4 2", None, id="ranks-that-do-not-agree"),
        pytest.param("", 4, "0", None, id="not-known"),
        pytest.param(TP2, 8, "4", 2, id="TP2-DP4"),
        pytest.param(f"{TP2} {PP2}", 8, "4", None, id="TP2-PP2-DP2-each-stage-on-a-node"),
        pytest.param(f"{TP2} {PP2} --use-tp-pp-dp-mapping", 8, "4", None, id="TP2-PP2-DP2-a-replica-a-node"),
        pytest.param(f"{PP2} {CP2}", 16, "4", 2, id="PP2-CP2-DP4"),
    ],
)
def test_data_parallel_ranks_of_a_node(
    tmp_path: Path, flags: str, num_ranks: int, local_world_sizes: str, expected: int | None
) -> None:
    command = f"{flags} --local-world-sizes {local_world_sizes}".split()
    ran = train(tmp_path, command, num_ranks=num_ranks, module="group_ranks", timeout_seconds=120)
    assert [rank[0]["ranks_per_node"] for rank in ran.ranks] == [expected] * num_ranks


def test_a_run_on_two_nodes_plans_for_them(tmp_path: Path) -> None:
    flags = "--num-layers 1 --hidden-size 32 --num-attention-heads 4 --seq-length 256 --max-position-embeddings 256"
    flags += " --global-batch-size 8 --train-iters 2 --use-dynamic-batch-size --max-tokens-per-gpu 512 --balance-data"
    ran = train(tmp_path, flags.split(), num_ranks=4, module="node_steps", timeout_seconds=120)
    assert [[step["ranks_per_node"] for step in rank] for rank in ran.ranks] == [[2, 2]] * 4


def test_a_group_that_is_made_while_a_run_balances_meets(tmp_path: Path) -> None:
    """The observer's group is of ranks that read data: torch 2.15 hung here when they alone had made it."""
    flags = "--num-layers 1 --hidden-size 32 --num-attention-heads 4 --seq-length 256 --max-position-embeddings 256"
    flags += f" --global-batch-size 4 --train-iters 2 {TP2} --use-dynamic-batch-size --max-tokens-per-gpu 512"
    ran = train(tmp_path, f"{flags} --balance-data".split(), num_ranks=4, module="later_group", timeout_seconds=120)
    assert [rank[0]["ranks_met"] for rank in ran.ranks] == [[0, 1, 2, 3]] * 4


def made_groups(source: str) -> Iterator[str]:
    """Faults in the calls of torch's functions that make process groups."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.keyword) and node.arg == "use_local_synchronization":
            yield f"{node.lineno}: use_local_synchronization"
        if isinstance(node, ast.Attribute) and node.attr in ("new_group", "split_group", "new_subgroups"):
            yield f"{node.lineno}: {node.attr}"


def test_groups_are_made_in_two_places_by_every_rank() -> None:
    found = {
        (file.relative_to(PACKAGE).as_posix(), what.partition(": ")[2])
        for file in PACKAGE.rglob("*.py")
        for what in made_groups(file.read_text(encoding="utf-8"))
    }
    assert found == {("mcore/setup/groups.py", "new_group"), ("adapters/areal/single_rank.py", "new_group")}
    assert list(made_groups("import torch.distributed as dist\ndist.new_group(r, use_local_synchronization=True)")) == [
        "2: new_group",
        "2: use_local_synchronization",
    ]


@pytest.mark.parametrize(
    ("parallel", "num_ranks", "num_meetings"),
    # Flags, ranks of a node, and one for each kind of group of two ranks or more.
    [
        pytest.param("", 2, 4, id="DP2"),
        pytest.param("--tensor-model-parallel-size 2", 4, 5, id="TP2"),
        pytest.param("--pipeline-model-parallel-size 2", 4, 5, id="PP2"),
    ],
)
def test_meetings_in_the_store_before_a_run_are_counted(
    tmp_path: Path, parallel: str, num_ranks: int, num_meetings: int
) -> None:
    flags = f"{FLAGS} {parallel} {BALANCED} --num-layers 2 --train-iters 2".split()
    ran = train(tmp_path, flags, num_ranks=num_ranks, module="store_meetings")
    for steps in ran.ranks:
        assert [len(step["topics"]) for step in steps] == [num_meetings] * 2
