"""Plans in which every micro-batch has a context-parallel size of its own.

The `dp_size * cp_size` ranks of a replica are the leaves of a binary tree (a forest where they are no power of
two). A micro-batch stands on a node: its `2**level` leaves, a group, share its samples by context parallelism.

    samples.py, sizing.py          cost and tokens of every sample at every size
    bound.py                       a time that no such plan can beat
    tree.py, node_packs.py         `step`: a node for every sample, so that the fullest leaf is least
    row_outline.py, rows.py,       `microbatch`, `pipeline`: rows of groups in which all leaves meet
    packs.py, shelves.py
    groups.py                      the result: groups, their leaves and their slots

Each objective says which of these it plans by (`Objective.place_groups`); `planner/dynamic_cp_schedule.py` has the
schedule and its invariants.
"""
