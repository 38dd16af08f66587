"""Golden bars: the quality of plans against bounds and optima that share no code with the planner.

golden.json holds for each cell the bar and beside it what was seen when the bar was set, on the public sets and on
their fits (`python tests/kit/plan_cells.py` prints these anew), and the optima of small batches, proved once by a
constraint solver. A bar may fall; who raises one says in the commit what it buys.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from plan_cells import CELLS, hashes, least_time
from plan_judge import Batch

from benchmarks.pipelines.command import CELLS as PIPELINES
from benchmarks.planner.setups import draw_lengths
from megatron_balance import CostModel, Limits, Topology, build_data_schedule
from megatron_balance.planner import batch_of
from megatron_balance.planner.pipeline_packing import plan_pipeline

GOLDEN = json.loads((Path(__file__).parent / "golden.json").read_text())


def test_every_cell_has_a_bar():
    assert set(GOLDEN["cells"]) == set(CELLS)


@pytest.mark.parametrize("name", CELLS)
def test_plans_stay_below_their_bars(name):
    cell, bar = CELLS[name], GOLDEN["cells"][name]["bar"]
    ratios = []
    for schedule, batch in cell.plans():
        assert batch_of(schedule).shift == 0
        if not cell.topology.dynamic_cp:
            assert schedule.predicted_cost == batch.per_gpu(batch.time(schedule.ranks))
        least = batch.per_gpu(least_time(batch))
        if schedule.move_samples and schedule.groups is None:
            assert schedule.lower_bound >= least
        assert least <= schedule.predicted_cost
        assert schedule.metrics().num_over_cap == 0
        ratios.append(schedule.predicted_cost / least)
    assert max(ratios) <= bar, ratios


def test_plans_are_those_of_the_last_change_of_the_search():
    """Other names change no plan. Who changes the search runs `python tests/kit/plan_cells.py --hashes`."""
    assert hashes() == GOLDEN["hashes"]


@pytest.mark.parametrize("name", GOLDEN["annealed"])
def test_pipelines_are_near_annealed_references(name):
    """Of fitted lengths, by `benchmarks/pipelines`: the best of annealing from six starts, 250,000 exchanges each."""
    cell = next(cell for cell in PIPELINES if str(cell) == name)
    batch = cell.batch(draw_lengths(cell.lengths, num_samples=cell.count, longest=cell.cap, folder=None))
    plan = plan_pipeline(batch)
    assert batch.time(plan.microbatch_of, plan.cp_sizes) <= 1.05 * GOLDEN["annealed"][name]


@pytest.mark.parametrize("kind", GOLDEN["optima"])
def test_plans_are_near_the_optimum_and_bounds_below_it(kind):
    bars, ratios = GOLDEN["optima"][kind], []
    for batch in bars["batches"]:
        patches = batch.get("image_patches")
        schedule = build_data_schedule(
            batch["lengths"],
            cost_model=CostModel(**batch["cost_model"]),
            topology=Topology(**batch["topology"]),
            limits=Limits(batch["cap"]),
            objective=batch["objective"],
            **({} if patches is None else {"image_patches": patches}),
        ).check()
        best = batch["optimum"]
        assert max(least_time(Batch.of(schedule, patches=patches)), schedule.lower_bound) <= best
        assert best <= schedule.predicted_cost
        ratios.append(schedule.predicted_cost / best)
    assert sum(ratios) / len(ratios) <= bars["mean"], ratios
    assert max(ratios) <= bars["worst"], ratios


DIGESTS = """
from plan_cells import CELLS
names = [name for name in CELLS if CELLS[name].count <= 256 and "pipeline" not in name]
print([next(CELLS[name].plans())[0].digest() for name in names])
"""


def test_every_process_makes_the_same_plans():
    found = set()
    for seed in ("0", "1", "4242"):
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        done = subprocess.run(
            [sys.executable, "-c", DIGESTS], env=environment, check=True, capture_output=True, text=True
        )
        found.add(done.stdout)
    assert len(found) == 1
    assert len(json.loads(found.pop())) > 30
