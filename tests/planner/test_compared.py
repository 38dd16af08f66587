"""The ways of other systems that the table Compared with plans by, on one batch."""

from itertools import chain

import numpy as np

from benchmarks.planner.baselines import round_robin
from benchmarks.planner.compared import SETUPS, dev_sizes, packed
from benchmarks.planner.measure import judged

LENGTHS = np.array([9000, 300, 8000, 40, 500, 6000, 700, 900, 60, 70, 80, 90, 11000, 200, 210, 220])


def test_packing_moves_no_sample_and_fills_no_micro_batch_above_the_cap():
    for setup in SETUPS:
        plan, alone = packed(LENGTHS, setup), round_robin(LENGTHS, setup)
        assert [sorted(chain(*slots)) for slots in plan] == [sorted(chain(*slots)) for slots in alone]
        assert judged(plan, batch=LENGTHS, setup=setup).num_over_cap == 0


def test_rows_of_dynamic_sizes_are_judged_as_groups_of_neighbours():
    def scheduler(lengths, **_):
        return [[[1], [0], [0], [2], [2], [3], [4], [5]], [[index] for index in range(6, 14)], [[14], [15]]]

    shared = dev_sizes(LENGTHS, SETUPS[0], scheduler=scheduler)
    assert shared.cp_size_grid[:, 0].tolist() == [2, 2, 2, 2, 1, 1, 1, 1]
    assert shared.microbatch_of[[0, 2]].tolist() == [0, 2 * 3]  # the first of three slots of ranks 0 and 2
    assert shared.metrics().mean_cp_size == 1 + (LENGTHS[0] + LENGTHS[2]) / LENGTHS.sum()
