import json

import numpy as np
import pytest

from benchmarks.dynamic_cp.__main__ import main
from benchmarks.dynamic_cp.dev_scheduler import CHECKOUT, load_scheduler
from benchmarks.dynamic_cp.measure import measure_cell, plan, time_of_rows
from benchmarks.dynamic_cp.setups import QUICK_SETUPS, SETUPS, TIMED_SETUPS, batches

# A scheduler of the checkout's shape: each sample on all ranks, one a row.
ONE_SAMPLE_A_ROW = """
import torch_that_is_not_there

_DYNAMIC_CP_WORKLOAD_CAP_DELTA = 0.05


def next_hdp_group_packing_aware(sample_seqlens, total_gpus, max_seq_len_per_rank, min_cp_size=1):
    return None, sample_seqlens[1:], None, [[sample_seqlens[0][0]]] * total_gpus


@lru_cache(maxsize=128)
def dcp_gpus_needed(seq_len, max_seq_len_per_rank):
    return ceil(log2(seq_len))
"""


@pytest.fixture
def checkout(tmp_path):
    folder = tmp_path / "dev" / "megatron" / "core" / "datasets"
    folder.mkdir(parents=True)
    (folder / "data_schedule_utils.py").write_text(ONE_SAMPLE_A_ROW)
    return tmp_path / "dev"


def test_a_scheduler_of_a_checkout_runs_without_what_its_module_imports(checkout):
    rows = load_scheduler(checkout)(np.array([5, 9, 7]), num_ranks=2, max_tokens_per_gpu=4)
    assert rows == [[[1], [1]], [[2], [2]], [[0], [0]]]


def test_a_checkout_that_lacks_the_scheduler_is_refused(checkout, tmp_path):
    with pytest.raises(ValueError, match=CHECKOUT):
        load_scheduler(tmp_path)
    (checkout / "megatron" / "core" / "datasets" / "data_schedule_utils.py").write_text("def other(): ...\n")
    with pytest.raises(ValueError, match="0 of"):
        load_scheduler(checkout)


def test_rows_are_judged_by_the_number_of_ranks_that_hold_a_sample():
    setup = SETUPS[0]
    batch = next(batches(setup, num_batches=1, folder=None))
    schedule = plan(batch, setup=setup, exchange=0.01, objective="microbatch")
    samples = schedule.samples()
    # A plan of this package, row by row, has the time that it predicts.
    rows = [list(map(list, row)) for row in zip(*schedule.ranks, strict=True)]
    assert time_of_rows(rows, samples=samples, objective="microbatch") == schedule.predicted_cost
    assert time_of_rows(rows, samples=samples, objective="step") == schedule.cost_grid.sum(axis=1).max()


@pytest.mark.parametrize("objective", ["step", "microbatch"])
def test_plans_are_below_the_fixed_size_and_near_the_ideal(objective):
    setup = SETUPS[2]
    planned = [(batch, None) for batch in batches(setup, num_batches=2, folder=None)]
    free = measure_cell(setup, exchange=0.0, objective=objective, planned=planned)
    between_nodes = measure_cell(setup, exchange=0.08, objective=objective, planned=planned)
    assert free.bound <= free.ours <= 1.012
    assert free.bound <= free.filled <= 1.012  # the contract of dev's executor costs next to nothing
    assert between_nodes.bound <= between_nodes.ours < between_nodes.fixed
    assert (free.num_over_cap, between_nodes.num_over_cap, free.dev) == (0, 0, None)


def test_every_setup_has_room_for_its_samples():
    for setup in (*SETUPS, *TIMED_SETUPS):
        for batch in batches(setup, num_batches=1, folder=None):
            assert batch.size == setup.global_batch_size
            largest = setup.topology.dynamic_cp_sizes[-1]
            assert int(batch.max()) <= setup.max_tokens_per_gpu * largest


def test_the_quick_run_writes_figures_and_a_page(tmp_path, checkout, monkeypatch, capsys):
    monkeypatch.setenv(CHECKOUT, str(checkout))
    assert main(["--quick", "--synthetic", "--out", str(tmp_path)]) == 0
    content = json.loads((tmp_path / "dynamic_cp.json").read_text())
    assert len(content["cells"]) == len(QUICK_SETUPS) * 6
    assert all(cell["ours"] < cell["dev"] for cell in content["cells"])
    page = (tmp_path / "dynamic_cp.md").read_text()
    assert page == capsys.readouterr().out
    assert "| step | 0 |" in page
    monkeypatch.delenv(CHECKOUT)
    assert main(["--quick", "--synthetic", "--out", str(tmp_path)]) == 0
    assert "names no checkout" in (tmp_path / "dynamic_cp.md").read_text()
