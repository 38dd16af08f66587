"""Begin and end of micro-batches, and the ranks that wait, under each objective."""

from __future__ import annotations

import numpy as np
import pytest
from report_runs import run_info

from megatron_balance import Topology
from megatron_balance.planner.makespan import pipeline_makespans
from megatron_balance.report.timeline import step_timeline

DURATIONS = np.array([[3.0, 1.0], [1.0, 2.0], [2.0, 2.0], [1.0, 5.0]])


def test_step_runs_back_to_back_and_waits_at_the_end() -> None:
    timeline = step_timeline(DURATIONS, info=run_info(Topology(4)))
    assert timeline.starts.tolist() == [[0, 3], [0, 1], [0, 2], [0, 1]]
    assert timeline.total == 6
    assert timeline.idle_fraction == pytest.approx(1 - 17 / 24)


def test_microbatch_waits_inside_each_slot() -> None:
    timeline = step_timeline(DURATIONS, info=run_info(Topology(4, fully_sharded=True)))
    assert timeline.starts.tolist() == [[0, 3]] * 4
    assert timeline.total == 8


def test_expert_groups_wait_among_themselves() -> None:
    timeline = step_timeline(DURATIONS, info=run_info(Topology(4, ep_size=2)))
    assert timeline.starts.tolist() == [[0, 3], [0, 3], [0, 2], [0, 2]]
    assert timeline.total == 7


def test_pipeline_ends_with_its_makespan() -> None:
    info = run_info(Topology(4, pp_size=2))
    timeline = step_timeline(DURATIONS, info=info)
    assert timeline.starts.tolist() == [[0, 3], [0, 1], [0, 2], [0, 1]]
    makespans = pipeline_makespans((DURATIONS * 2 * 3000).astype(np.int64), pp_size=2)
    assert timeline.total == pytest.approx(makespans.max() / 3000, rel=1e-3)
    assert timeline.total > 6
    # Measured times hold no bubble.
    assert step_timeline(DURATIONS, info=info, with_bubble=False).total == 6


@pytest.mark.parametrize(
    "topology", [Topology(8), Topology(8, ep_size=4), Topology(8, pp_size=4), Topology(8, fully_sharded=True)]
)
def test_micro_batches_of_a_rank_do_not_overlap(topology: Topology) -> None:
    durations = np.random.default_rng(0).uniform(0, 5, (8, 6))
    timeline = step_timeline(durations, info=run_info(topology))
    ends = timeline.starts + timeline.durations
    assert (timeline.starts[:, 1:] >= ends[:, :-1] - 1e-9).all()
    assert ends.max() <= timeline.total + 1e-9
