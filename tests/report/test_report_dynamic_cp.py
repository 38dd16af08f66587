"""Runs whose micro-batches have context-parallel sizes of their own: rows are leaves, and blocks reach over several."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from report_runs import measured, planned_step, run_info

from megatron_balance import CostModel, Limits, Topology
from megatron_balance.record.run_record import RunRecord
from megatron_balance.report.page import write_page
from megatron_balance.report.run_figures import run_figures
from megatron_balance.report.timeline_data import timeline_data
from megatron_balance.report.trace import write_trace

COST_MODEL = CostModel(linear=2000, quadratic=1, cp_exchange=20)
CP_SIZE = 2


def record(**ranks: int) -> RunRecord:
    topology = Topology(3, cp_size=CP_SIZE, dynamic_cp=True, **ranks)
    info = run_info(topology, limits=Limits(2048), cost_model=COST_MODEL)
    steps = (planned_step(info, iteration=index + 1, num_samples=48, seed=index) for index in range(3))
    return RunRecord(info, tuple(map(measured, steps)))


def test_a_block_has_the_size_and_the_samples_of_its_group() -> None:
    run = record()
    for step, drawn in zip(run.steps, timeline_data(run_figures(run)).steps, strict=True):
        assert step.cp_sizes is not None
        panel = {panel["key"]: panel for panel in drawn["panels"]}["planned"]
        assert drawn["ranks"] == list(range(6))
        assert panel["sizes"] == step.cp_sizes.ravel().tolist()
        ends = np.cumsum(panel["counts"])
        ids = [panel["ids"][start:end] for start, end in zip([0, *ends], ends, strict=False)]
        of_leaves = np.array([len(of_slot) for of_slot in ids]).reshape(step.cp_sizes.shape)
        for leaf, slot in zip(*np.nonzero(step.cp_sizes > 1), strict=True):
            first = leaf - leaf % step.cp_sizes[leaf, slot]
            num_slots = step.num_microbatches
            assert ids[leaf * num_slots + slot] == ids[first * num_slots + slot] != []
            # They come to it and leave it at the same time.
            for name in ("starts", "ends"):
                times = np.array(panel[name]).reshape(step.cp_sizes.shape)
                assert abs(times[leaf, slot] - times[first, slot]) <= 1
        assert (of_leaves > 0).any()


def test_stock_runs_on_the_leaves_of_its_ranks_and_pays_for_communication() -> None:
    run = record()
    figures = run_figures(run)
    for step, stock in zip(run.steps, figures.stock.steps, strict=True):
        times = figures.scale.times(stock)
        assert times.shape[0] == 6
        assert np.array_equal(times[::2], times[1::2])
        padded = -(-step.lengths // 4) * 4
        costs = [COST_MODEL(length) + COST_MODEL.cp_exchange * length for length in padded.tolist()]
        of_leaves = np.bincount(stock.slot_of // stock.num_microbatches, weights=costs) / CP_SIZE
        assert times[::2].sum(axis=1) == pytest.approx(of_leaves * figures.scale.per_cost)
    assert figures.speed_up > 1.1
    assert (figures.planned.imbalance < figures.stock.imbalance).all()


def test_a_slot_that_a_leaf_lacks_is_neither_measured_nor_drawn(tmp_path: Path) -> None:
    run = record()
    lacking = [int((step.cp_sizes == 0).sum()) for step in run.steps if step.cp_sizes is not None]
    assert sum(lacking) > 0
    figures = run_figures(run)
    assert not np.isnan(figures.measured_imbalance).any()
    events = json.loads(write_trace(figures, out=tmp_path / "trace.json").read_text())["traceEvents"]
    slices = [event for event in events if event["ph"] == "X" and "samples" in event["args"]]
    assert len(slices) == sum(step.cost_grid.size for step in run.steps) - sum(lacking)
    assert {event["args"]["cp_size"] for event in slices} == {1, 2, 4}


@pytest.mark.parametrize("ranks", [{}, {"pp_size": 2}, {"ep_size": 6}])
def test_the_page_is_written_for_every_objective(ranks: dict[str, int], tmp_path: Path) -> None:
    page = write_page(run_figures(record(**ranks)), out=tmp_path / "page.html").read_text()
    assert '"sizes":[' in page
    assert "data- and context-parallel ranks" in page
