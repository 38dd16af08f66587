"""Our plans in the place of Megatron dev's scheduler of dynamic context parallelism: the seam by itself, and dev's own
training loop and tests on a checkout.

MEGATRON_DEV_CHECKOUT=DIR python -m pytest -m checkout tests/megatron/test_dynamic_packing_scheduler.py
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import types
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from dynamic_contract import check_contract
from hypothesis import given, settings
from hypothesis import strategies as st
from rounding import assert_equal
from training_run import Recorded, read_records, search_path

from megatron_balance import BalanceError, CostModel
from megatron_balance.devkit.smoke import CPU_FLAGS, ENVIRONMENT, MODEL_FLAGS, TRAINING_FLAGS
from megatron_balance.mcore import dynamic_packing_scheduler
from megatron_balance.mcore.dynamic_packing_scheduler import (
    REPLACED,
    dynamic_scheduler_class,
    replace_dynamic_scheduler,
)

CHECKOUT = os.environ.get("MEGATRON_DEV_CHECKOUT", "")
CAP = 256
COST = CostModel(linear=1000, quadratic=1, cp_exchange=30)


class Stock:
    """Megatron's DefaultDynamicCPScheduler, as far as ours relies on it."""

    def __init__(
        self,
        max_seqlen_per_dp_cp_rank: int,
        cp_size: int,
        dp_size: int,
        microbatch_group_size_per_vp_stage: int | None,
        max_num_seqs: int | None = None,
        *,
        min_cp_size: int = 1,
    ) -> None:
        self.max_seqlen_per_dp_cp_rank = max_seqlen_per_dp_cp_rank
        self.cp_size = cp_size
        self.dp_size = dp_size
        self.microbatch_group_size_per_vp_stage = microbatch_group_size_per_vp_stage
        self.max_num_seqs = max_num_seqs
        self.min_cp_size = min_cp_size

    def get_groups_and_subsamples(self, sample_id_seqlens: Any) -> Any:
        return ["Megatron's own plan of", sample_id_seqlens]

    def run(
        self,
        data_iterator: Any,
        num_microbatches: int,
        dp_group: Any,
        tp_group: Any,
        pp_group: Any,
        dp_cp_group: Any,
        dev: Any,
        config: Any,
    ) -> Any:
        return self.get_groups_and_subsamples(data_iterator)


@pytest.fixture
def seam(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """A module with the map, where dev's would be."""
    module = types.ModuleType(dynamic_packing_scheduler.SEAM)
    module.scheduler_map = {"dp_balanced": object, REPLACED: Stock}  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, dynamic_packing_scheduler.SEAM, module)
    monkeypatch.setattr(dynamic_packing_scheduler.importlib.util, "find_spec", lambda name: name)
    return module


def test_takes_the_place_of_megatrons_own_and_gives_it_back(seam: Any) -> None:
    replacement = replace_dynamic_scheduler()
    assert replacement is not None
    assert issubclass(seam.scheduler_map[REPLACED], Stock)
    assert seam.scheduler_map[REPLACED] is not Stock
    replacement.undo()
    assert seam.scheduler_map == {"dp_balanced": object, REPLACED: Stock}


def test_undo_refuses_when_someone_else_has_replaced_it_since(seam: Any) -> None:
    replacement = replace_dynamic_scheduler()
    assert replacement is not None
    seam.scheduler_map[REPLACED] = Stock
    with pytest.raises(BalanceError, match=r"default_dynamic_cp.* was replaced after"):
        replacement.undo()


@pytest.mark.parametrize("schedulers", [{"dp_balanced": Stock}, {}, None, {REPLACED: "not a class"}])
def test_a_map_of_another_form_is_left_alone(seam: Any, schedulers: Any) -> None:
    seam.scheduler_map = schedulers
    assert replace_dynamic_scheduler() is None
    assert seam.scheduler_map is schedulers


def test_without_a_cost_model_the_plan_is_megatrons() -> None:
    scheduler = dynamic_scheduler_class(Stock, cost_model=lambda: None)(CAP, 1, 2, None)
    assert scheduler.get_groups_and_subsamples([(0, 16)]) == ["Megatron's own plan of", [(0, 16)]]


def test_a_run_without_balance_flags_has_no_cost_model() -> None:
    assert dynamic_packing_scheduler._cost_model() is None


@settings(max_examples=60)
@given(
    st.lists(st.integers(1, 900), min_size=1, max_size=48),
    st.sampled_from([(2, 1), (1, 2), (2, 2), (4, 2)]),
    st.sampled_from([1, 2]),
)
def test_the_contract_of_get_groups_and_subsamples(lengths: list[int], sizes: tuple[int, int], least: int) -> None:
    num_ranks = sizes[0] * sizes[1]
    padded = [length + -length % (2 * num_ranks) for length in lengths]
    scheduler = dynamic_scheduler_class(Stock, cost_model=lambda: COST)(
        CAP, sizes[1], sizes[0], None, min_cp_size=least
    )
    groups = scheduler.get_groups_and_subsamples(list(enumerate(padded)))
    check_contract(groups, lengths=dict(enumerate(padded)), num_ranks=num_ranks, cap=CAP, least=least)


def test_stages_and_experts_are_those_of_the_run() -> None:
    scheduler = dynamic_scheduler_class(Stock, cost_model=lambda: COST)(CAP, 1, 4, 2)
    config = SimpleNamespace(virtual_pipeline_model_parallel_size=3, expert_model_parallel_size=2)
    stages = SimpleNamespace(size=lambda: 2)
    lengths = [64] * 24
    groups = scheduler.run(list(enumerate(lengths)), 24, None, None, stages, None, None, config)
    topology = scheduler.topology
    assert (topology.pp_size, topology.vpp_size, topology.ep_size, topology.microbatch_multiple) == (2, 3, 2, 2)
    check_contract(groups, lengths=dict(enumerate(lengths)), num_ranks=4, cap=CAP, multiple=2)


def test_more_samples_than_megatron_allows_are_refused() -> None:
    scheduler = dynamic_scheduler_class(Stock, cost_model=lambda: COST)(400, 1, 1, None, max_num_seqs=3)
    assert scheduler.get_groups_and_subsamples([(i, 100) for i in range(3)]) == [[[0, 1, 2]]]
    with pytest.raises(BalanceError, match="holds 4 samples and --thd-max-packed-sequences allows 3"):
        scheduler.get_groups_and_subsamples([(i, 100) for i in range(4)])


# On a checkout of dev.

NUM_STEPS = 3
FLAGS = (
    f"{CPU_FLAGS} {MODEL_FLAGS} {TRAINING_FLAGS} --vocab-size 1001 --num-layers 2 --hidden-size 32 "
    "--num-attention-heads 4 --num-query-groups 2 --ffn-hidden-size 64 --seq-length 1024 "
    f"--max-position-embeddings 1024 --global-batch-size 24 --train-iters {NUM_STEPS} --eval-iters 1 "
    "--mock-data --sft --dynamic-context-parallel "
    f"--max-seqlen-per-dp-cp-rank {CAP}"
)
EXPERTS = (
    "--num-experts 4 --moe-router-topk 2 --moe-token-dispatcher-type alltoall --moe-router-load-balancing-type none"
)


def launched(script: str, *arguments: str, num_ranks: int) -> str:
    """Runs a file of this folder on CPU ranks, with the checkout's Megatron. Returns all that it printed."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
    command += [str(Path(__file__).parent / script), *arguments]
    paths = os.pathsep.join([CHECKOUT, search_path()])
    environment = os.environ | ENVIRONMENT | {"PYTHONPATH": paths, "MEGATRON_BALANCE_ANY_VERSION": "1"}
    done = subprocess.run(command, env=environment, text=True, capture_output=True, timeout=900, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-8000:]
    return done.stdout + done.stderr


def trained(folder: Path, flags: str, *, num_ranks: int) -> tuple[Recorded, list[list[int]]]:
    """Trains with dev's pretrain_gpt.py. Returns the steps, and the sizes of rank 0's micro-batches, step by step."""
    lengths = random.Random(1)
    # Multiples of the padding for all sizes: the tokenizer of mock data has no token to pad with.
    drawn = [min(896, (int(lengths.lognormvariate(4.6, 0.9)) // 16 + 1) * 16) for _ in range(400)]
    folder.mkdir(parents=True)
    (folder / "lengths.csv").write_text("\n".join(["length", *map(str, drawn)]))
    data = ["--sft-mock-dataset-config-json", json.dumps({"mode": "file", "path": str(folder / "lengths.csv")})]
    output = launched(
        "dev_dynamic_rank.py", str(folder), CHECKOUT, *f"{FLAGS} {flags}".split(), *data, num_ranks=num_ranks
    )
    sizes = [json.loads(line) for line in (folder / "plans0.jsonl").read_text().splitlines()]
    return Recorded(ranks=read_records(folder, num_ranks=num_ranks), output=output), sizes


@pytest.mark.checkout
@pytest.mark.parametrize(
    "flags",
    [
        pytest.param("", id="DP4"),
        # Two ranks must hold the longest row.
        pytest.param("--pipeline-model-parallel-size 2 --max-seqlen-per-dp-cp-rank 512", id="PP2-DP2"),
        pytest.param(f"{EXPERTS} --expert-model-parallel-size 2", id="EP2-DP4"),
    ],
)
def test_devs_own_loop_trains_as_with_its_own_scheduler(tmp_path: Path, flags: str) -> None:
    stock, stock_sizes = trained(tmp_path / "stock", flags, num_ranks=4)
    ours, sizes = trained(tmp_path / "ours", f"{flags} --balance-data", num_ranks=4)
    assert len(ours.steps) == NUM_STEPS
    assert_equal(ours, reference=stock)
    assert sizes != stock_sizes
    assert len({size for step in sizes for size in step}) > 1


@pytest.mark.checkout
def test_devs_own_tests_of_the_executor_pass(tmp_path: Path) -> None:
    """test_wrap_dataloader of its unit tests, eight ranks, unedited, with our scheduler in the map."""
    launched("dev_unit_rank.py", str(tmp_path), CHECKOUT, num_ranks=8)
    outcomes = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(8)]
    assert all(outcome["passed"] == outcomes[0]["passed"] for outcome in outcomes)
    assert len(outcomes[0]["passed"]) == 4
    assert all(not outcome["failed"] and outcome["num_plans"] for outcome in outcomes)
