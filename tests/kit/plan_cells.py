"""The cells in which the quality of plans is measured: a topology, a cost, and lengths that nobody tuned for.

`python tests/kit/plan_cells.py` prints what plans reach today, as tests/planner/golden.json keeps it. Lengths are drawn
with fixed seeds, or chosen from the public sets in ../shared/data/lengths where those are there, and else from the fits
that the package has of them.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from plan_judge import Batch

from megatron_balance import CostModel, Limits, Topology, build_data_schedule
from megatron_balance.lengths import synthetic_lengths

REAL_LENGTHS = Path(__file__).parents[3] / "shared" / "data" / "lengths"
CAP = 8192
LIMITS = Limits(CAP)

# Training FLOPs of a token over those of a squared token: an 8B dense model, a 30B mixture of experts, an 8B model with
# keys and values received between nodes, and a 7B model with a vision encoder. A micro-batch costs 128 tokens.
DENSE = CostModel(linear=44_000, quadratic=1, per_microbatch=128 * 44_000)
EXPERTS = CostModel(linear=5_600, quadratic=1, expert_linear=7_600, per_microbatch=128 * 13_200)
SHARED = CostModel(linear=44_000, quadratic=1, cp_exchange=3_500)
IMAGES = CostModel(linear=60_000, quadratic=1, per_microbatch=128 * 60_000, image_linear=6_000, image_quadratic=1)


def lognormal(generator, count, longest):
    """Median 1,480 tokens."""
    return np.clip(generator.lognormal(7.3, 1.1, count), 16, longest)


def bimodal(generator, count, longest):
    """Short answers, and one sample in five that fills most of a micro-batch."""
    long = generator.normal(0.7 * longest, 0.1 * longest, count)
    return np.clip(np.where(generator.random(count) < 0.2, long, generator.normal(400, 120, count)), 16, longest)


def giant(generator, count, longest):
    """Short samples and one as long as a micro-batch."""
    lengths = np.clip(generator.lognormal(6.0, 0.8, count), 16, longest)
    lengths[0] = longest
    return lengths


def pareto(generator, count, longest):
    """A tail that is heavier than lognormal."""
    return np.clip(200 * (1 + generator.pareto(1.1, count)), 16, longest)


def equal(generator, count, longest):
    """All the same."""
    return np.full(count, generator.integers(longest // 9, longest // 2))


DYNAMIC_LAYOUTS = {"step": {}, "microbatch": {"fully_sharded": True}, "pipeline": {"pp_size": 2}}
FAMILIES = {family.__name__: family for family in (lognormal, bimodal, giant, pareto, equal)}


def draw(name, *, count, longest, seed, real=True):
    """`[count]` int64 lengths of a family, or of a public set; of its fit where the set is not there or not wanted."""
    generator = np.random.default_rng([seed, count])
    if name in FAMILIES:
        return FAMILIES[name](generator, count, longest).astype(np.int64)
    path = REAL_LENGTHS / f"{name}.npz"
    if real and path.is_file():
        with np.load(path) as data:
            lengths = data["length"].astype(np.int64)
    else:
        lengths = synthetic_lengths(name, num_samples=8 * count, seed=seed)
    return np.resize(generator.permutation(lengths[(lengths > 0) & (lengths <= longest)]), count)


@dataclass(frozen=True)
class Cell:
    """What is planned, on `seeds` global batches; bars of one kind are alike."""

    name: str  # in golden.json
    kind: str
    topology: Topology
    lengths: str  # a family, or a public set
    count: int  # samples of the global batch
    cost_model: CostModel = DENSE
    limits: Limits = LIMITS
    objective: str = "auto"
    seeds: int = 3
    # Further ones of `build_data_schedule`, from the generator, the samples and the ranks.
    options: Callable[[np.random.Generator, int, int], dict[str, Any]] = lambda generator, count, ranks: {}

    def plans(self, *, real=True):
        """The checked plans, and the batches that judge them."""
        sharing = min(self.topology.dp_cp_size, 16) if self.topology.dynamic_cp else self.topology.cp_size
        longest = (self.limits.max_tokens_per_gpu or CAP) * sharing
        for seed in range(self.seeds):
            lengths = draw(self.lengths, count=self.count, longest=longest, seed=seed, real=real)
            generator = np.random.default_rng([seed, 7])
            options = self.options(generator, self.count, self.topology.dp_size)
            schedule = build_data_schedule(
                lengths,
                cost_model=self.cost_model,
                topology=self.topology,
                limits=self.limits,
                objective=self.objective,
                **options,
            ).check()
            yield schedule, Batch.of(schedule, patches=options.get("image_patches"))

    def seen(self, *, real=True):
        """Predicted over least time, of each plan."""
        return [schedule.predicted_cost / batch.per_gpu(least_time(batch)) for schedule, batch in self.plans(real=real)]


def least_time(batch):
    """The independent bound."""
    return batch.least_time_of_sizes() if batch.topology.dynamic_cp else batch.least_time()


def pinned(generator, count, ranks):
    """Every rank loaded its share, in random order, and no sample moves."""
    return {"home_ranks": generator.permutation(np.arange(count) % ranks), "move_samples": False}


def siblings(generator, count, ranks):
    """Eight samples of a prompt stay on one rank."""
    return {"groups": np.arange(count) // 8}


def pictures(generator, count, ranks):
    """Two samples in five have one to four images."""
    numbers = np.where(generator.random(count) < 0.4, generator.integers(1, 5, count), 0)
    return {"image_patches": [generator.integers(256, 4096, number).tolist() for number in numbers]}


def _cells():
    for lengths, ranks, count in (
        ("lognormal", 4, 128),
        ("bimodal", 4, 128),
        ("giant", 4, 128),
        ("pareto", 4, 128),
        ("equal", 4, 128),
        ("code_files", 4, 128),
        ("tau_airline", 4, 128),
        ("reasoning_gym", 8, 256),
        ("servegen_mlarge", 32, 2048),
        ("lognormal", 128, 8192),
    ):
        yield Cell(f"step DP{ranks} {lengths}", "step", Topology(ranks), lengths, count)
        topology = Topology(ranks, fully_sharded=True)
        yield Cell(f"microbatch DP{ranks} {lengths}", "microbatch", topology, lengths, count)
    sharded = Topology(8, cp_size=2, tp_size=2, sequence_parallel=True)
    yield Cell("step DP8 CP2 pareto", "step", sharded, "pareto", 256)
    three = Limits(micro_batch_size=3)
    yield Cell("step DP4 three samples a micro-batch", "step", Topology(4), "pareto", 96, limits=three)
    yield Cell("step DP4 five samples", "few", Topology(4), "lognormal", 5)
    yield Cell("microbatch DP4 five samples", "few", Topology(4, fully_sharded=True), "lognormal", 5)
    for lengths, topology, count in (
        ("lognormal", Topology(8, ep_size=8), 256),
        ("reasoning_gym", Topology(16, ep_size=4), 512),
        ("bimodal", Topology(32, ep_size=8), 512),
        ("giant", Topology(32, ep_size=8), 512),
        ("pareto", Topology(64, ep_size=32), 4096),
    ):
        name = f"experts DP{topology.dp_size} EP{topology.ep_size} {lengths}"
        yield Cell(name, "experts", topology, lengths, count, cost_model=EXPERTS)
    # The bound is at fault here, by up to a fifth, not the plan: beside a dominant sample the cap has room for cheaper
    # work only, and all that joins its expert group delays its row. Seven million steps of annealing gain 0.6 %.
    topology = Topology(16, ep_size=4, fully_sharded=True)
    yield Cell("experts fully sharded DP16 EP4 pareto", "experts", topology, "pareto", 256, EXPERTS)
    yield Cell("step DP8 EP4 lognormal", "experts", Topology(8, ep_size=4), "lognormal", 256, EXPERTS, objective="step")
    for lengths, topology, count in (
        ("lognormal", Topology(4, pp_size=4), 128),
        ("code_files", Topology(8, pp_size=2, vpp_size=2, microbatch_multiple=2), 256),
        ("servegen_mlarge", Topology(16, pp_size=8), 2048),
        ("bimodal", Topology(16, ep_size=4, pp_size=2), 256),
    ):
        name = f"pipeline DP{topology.dp_size} PP{topology.pp_size} EP{topology.ep_size} {lengths}"
        model = EXPERTS if topology.ep_size > 1 else DENSE
        yield Cell(name, "pipeline", topology, lengths, count, cost_model=model)
    for ranks in (8, 32):
        for extra in ({}, {"fully_sharded": True}):
            name = f"images {'microbatch' if extra else 'step'} DP{ranks}"
            topology = Topology(ranks, **extra)
            yield Cell(name, "images", topology, "lognormal", 128 + 8 * ranks, cost_model=IMAGES, options=pictures)
    for name, options in (("pinned", pinned), ("siblings", siblings)):
        for objective in ("step", "microbatch"):
            topology = Topology(8, fully_sharded=objective == "microbatch")
            yield Cell(f"{name} {objective} DP8", name, topology, "reasoning_gym", 256, options=options)
    for lengths, ranks, cp_size, count in (
        ("lognormal", 8, 4, 512),
        ("code_files", 8, 8, 256),
        ("giant", 4, 8, 256),
        ("servegen_mlarge", 16, 2, 1024),
    ):
        for objective, extra in DYNAMIC_LAYOUTS.items():
            topology = Topology(ranks, cp_size=cp_size, dynamic_cp=True, **extra)
            name = f"dynamic CP {objective} DP{ranks} CP{cp_size} {lengths}"
            yield Cell(name, f"dynamic CP {objective}", topology, lengths, count, SHARED, Limits(CAP // 2), seeds=2)
    for ep_size in (8, 32):
        topology = Topology(8, cp_size=4, ep_size=ep_size, dynamic_cp=True)
        name = f"dynamic CP experts DP8 CP4 EP{ep_size} lognormal"
        model = replace(EXPERTS, cp_exchange=500, per_microbatch=0)
        yield Cell(name, "dynamic CP experts", topology, "lognormal", 512, model, Limits(CAP // 2), seeds=2)


CELLS = {cell.name: cell for cell in _cells()}


def hashes():
    """Cell → hash of the samples' micro-batches and their sizes, of fitted lengths with the first seed."""
    digests = {}
    for name, cell in CELLS.items():
        schedule, _ = next(cell.plans(real=False))
        grids = [schedule.microbatch_of, schedule.cp_size_grid]
        digests[name] = hashlib.sha256(b"".join(grid.astype("<i8").tobytes() for grid in grids)).hexdigest()[:12]
    return digests


if __name__ == "__main__":
    if "--hashes" in sys.argv:
        sys.exit(json.dumps(hashes()))
    for name, cell in CELLS.items():
        sets, fits = ([round(value, 5) for value in cell.seen(real=real)] for real in (True, False))
        print(json.dumps({name: {"sets": sets, "fits": fits}}))
