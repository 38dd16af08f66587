"""Other systems' ways to plan a global batch, each written from its description and named in the results.

A baseline takes `[num_samples]` original lengths and a setup, and returns for every rank its micro-batches.
They use this package's first fit and Karmarkar-Karp, which are as good as the originals' and faster: the
rows of the wheels show the originals' own times. Two rows need such a wheel and raise ImportError without.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from benchmarks.planner.baselines.areal_wheel import areal_wheel
from benchmarks.planner.baselines.equal_size_kk import equal_size_kk
from benchmarks.planner.baselines.lpt import lpt
from benchmarks.planner.baselines.next_fit import next_fit
from benchmarks.planner.baselines.ours import ours
from benchmarks.planner.baselines.pack_first import first_fit_only, first_fit_then_kk, kk_by_flops
from benchmarks.planner.baselines.round_robin import round_robin
from benchmarks.planner.baselines.verl_wheel import verl_wheel
from benchmarks.planner.setups import Setup

Ranks = Sequence[Sequence[Sequence[int]]]
"""For every rank, for every slot: sample ids."""

Baseline = Callable[[NDArray[np.int64], Setup], Ranks]

BASELINES: dict[str, Baseline] = {
    "round-robin (Megatron's sampler)": round_robin,
    "next-fit (Megatron main, dp_balanced)": next_fit,
    "first-fit (slime)": first_fit_only,
    "first-fit + KK on tokens (slime --balance-data)": first_fit_then_kk,
    "KK by FLOPs, no cap (slime --balance-by-flops)": kk_by_flops,
    "equal-size KK (verl's way, recsys)": equal_size_kk,
    "LPT by FLOPs + first-fit": lpt,
    "verl 0.9.1, its own functions": verl_wheel,
    "AReaL 1.0.4, its own functions": areal_wheel,
    "ours": ours,
}

FROM_WHEELS = ("verl 0.9.1, its own functions", "AReaL 1.0.4, its own functions")
"""Rows that run another project's own code."""
