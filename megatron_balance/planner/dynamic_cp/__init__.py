"""Planners for dynamic context-parallel sizes, chosen per micro-batch.

The `dp_size * cp_size` ranks are the leaves of a binary tree (a forest if their number is not a power of two). A
micro-batch is assigned to a node; its `2**level` leaves, a group, share its samples by context parallelism.

    samples.py, sizing.py          cost and tokens of every sample at every size
    bound.py                       lower bound on the time of such plans
    tree.py, node_packs.py         `step`: samples on nodes, minimizing the fullest leaf
    row_outline.py, rows.py,       `microbatch`, `pipeline`: rows of groups in which all leaves meet
    packs.py, shelves.py
    groups.py                      the result: groups, their leaves and their slots

`Objective.place_groups` chooses among these; `planner/dynamic_cp_schedule.py` has the schedule and its invariants.
"""
