"""AReaL's own functions, from its wheel."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from benchmarks.planner.setups import Setup


def areal_wheel(lengths: NDArray[np.int64], setup: Setup) -> list[list[list[int]]]:
    """AReaL 1.0.4: `balanced_greedy_partition` over ranks, then `ffd_allocate` under the cap on each.

    Both balance tokens. The loop stands for `allocate_balanced_mbs_synced`, which asks every rank again for
    the largest number of micro-batches. Micro-batches meet in AReaL's own order: by their first sample.

    Raises:
        ImportError: AReaL is not installed.
        RuntimeError: a rank has too few samples for the number of micro-batches.
    """
    from areal.utils.seqpack import balanced_greedy_partition, ffd_allocate

    tokens = setup.padded(lengths)
    parts = balanced_greedy_partition(tokens, setup.topology.dp_size)
    held = [[tokens[sample] for sample in part] for part in parts]
    count = 1
    while True:
        plans = [ffd_allocate(values, setup.cap, min_groups=count) for values in held]
        largest = max(map(len, plans))
        if all(len(slots) == largest for slots in plans):
            break
        count = largest
    return [
        [[part[position] for position in slot] for slot in sorted(sorted(map(int, slot)) for slot in slots)]
        for part, slots in zip(parts, plans, strict=True)
    ]
