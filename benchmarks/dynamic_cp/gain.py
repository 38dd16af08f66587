"""Step times with context-parallel sizes of their own, against the same training at one size, on four CPU ranks.

One sample in 32 has 8,192 tokens, the others 128 to 640. Steps take turns between the policies in one run (`turns.py`);
each policy also trains by itself, which shows that its turns cost what a run of its own costs, and that all losses are
equal. `megatron-balance fit` reads the record of a run on the same ranks first: its seconds make every plan, and
predict the gain.
"""

from __future__ import annotations

import functools
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from training_run import ENVIRONMENT, RECORD_STEPS, ROOT, Recorded, largest_difference, train

from benchmarks.dynamic_cp.policies import POLICIES, plan, policy_of_step
from benchmarks.publish import RAW, fresh, say
from megatron_balance.cost.calibration import UNITS_PER_SECOND, Calibration
from megatron_balance.topology import Limits, Topology
from tests.training.table import FAMILIES

NUM_RANKS = 4
GLOBAL_BATCH_SIZE = 32
LONG, SHORT = 8192, (128, 640)
"""Tokens of one sample of each batch, and of the shortest and the longest of the others."""

CAP = 4096
SEED = 1
WARM_UP_ROUNDS = 1
SHAPE_FLAGS = (
    "--num-layers 2 --hidden-size 64 --kv-channels 32 --num-attention-heads 4 --num-query-groups 4 "
    "--ffn-hidden-size 192"
)
STATIC = {"CP4": "--context-parallel-size 4", "CP2": "--context-parallel-size 2"}
DYNAMIC = "--context-parallel-size 2 --balance-dynamic-cp"
HEADS = "--linear-num-key-heads 4 --linear-num-value-heads 8"
"""Of delta nets in --models, for sizes up to 4."""

FAMILY = ROOT / "benchmarks" / "dynamic_cp" / "family.py"
TURNS = ROOT / "benchmarks" / "dynamic_cp" / "turns.py"


def measure_gain(*, rounds: int, steps: int) -> dict[str, Any]:
    work = fresh(RAW / "dynamic_cp_gain")
    num_turns = len(POLICIES) * (WARM_UP_ROUNDS + rounds)
    write_data(work / "data.jsonl", num_steps=max(num_turns, steps))

    run = functools.partial(_train, work)
    seconds = work / "seconds.json"
    run("recorded", f"{DYNAMIC} --balance-record {work / 'record'}", num_steps=steps)
    calibration = fitted(work / "record", out=seconds)
    costs = f"--balance-cost {seconds}"
    turns = run("turns", f"{DYNAMIC} {costs}", num_steps=num_turns, script=TURNS)
    alone = {name: run(f"alone_{name}", f"{STATIC.get(name, DYNAMIC)} {costs}", num_steps=steps) for name in POLICIES}
    return {
        "policies": {name: figures(name, turns=turns, alone=alone[name], calibration=calibration) for name in POLICIES},
        "calibration": {"held_out_error": calibration.held_out_error},
    }


def measure_models(names: Sequence[str], *, steps: int) -> dict[str, dict[str, Any]]:
    """Trains small models of these families at context-parallel size 2 and with several, planned by FLOPs."""
    work = fresh(RAW / "dynamic_cp_models")
    write_data(work / "data.jsonl", num_steps=steps)
    rows: dict[str, dict[str, Any]] = {}
    for name in names:
        runs = {
            policy: _train(
                work,
                f"{name}_{policy}",
                f"{FAMILIES[name]} {HEADS} {flags}",
                num_steps=steps,
                environment={"TRAINING_SCRIPT": str(FAMILY)},
            )
            for policy, flags in (("CP2", STATIC["CP2"]), ("dynamic", DYNAMIC))
        }
        counted = {policy: list(zip(*run.ranks, strict=True))[WARM_UP_ROUNDS:] for policy, run in runs.items()}
        rows[name] = {
            policy: statistics.median(max(rank["cpu_seconds"] for rank in step) for step in steps_of_policy)
            for policy, steps_of_policy in counted.items()
        } | {
            "sizes": sorted({size for step in counted["dynamic"] for rank in step for size in rank["cp_sizes"]}),
            "loss_difference": largest_difference(runs["dynamic"], reference=runs["CP2"], key="lm_loss"),
        }
    return rows


def _train(
    work: Path,
    name: str,
    flags: str,
    *,
    num_steps: int,
    script: Path = RECORD_STEPS,
    environment: Mapping[str, str] | None = None,
) -> Recorded:
    say(f"{name}: {num_steps} steps")
    common = (
        f"{SHAPE_FLAGS} --seq-length {LONG} --max-position-embeddings {LONG} --seed {SEED} "
        f"--train-iters {num_steps} --global-batch-size {GLOBAL_BATCH_SIZE} --data-path {work / 'data.jsonl'} "
        f"--use-dynamic-batch-size --max-tokens-per-gpu {CAP} --balance-data --balance-by-flops "
        f"{flags}"
    )
    ranks: Any = {"num_ranks": NUM_RANKS, "script": script, "environment": environment, "timeout_seconds": 1800}
    return train(work / name, common.split(), **ranks)


def fitted(record: Path, *, out: Path) -> Calibration:
    """The seconds of a recorded run on as many ranks as train."""
    command = [sys.executable, "-m", "megatron_balance", "fit", str(record), "--out", str(out)]
    subprocess.run(command, env=os.environ | ENVIRONMENT, check=True, stdout=sys.stderr)
    return Calibration.read(out)


def batch_lengths() -> NDArray[np.int64]:
    """Tokens of every global batch's samples, in another order in each."""
    short = np.linspace(*SHORT, GLOBAL_BATCH_SIZE - 1).astype(np.int64)
    return np.append(short, LONG)


def write_data(path: Path, *, num_steps: int) -> None:
    """Random tokens, in the lines in which pretrain_sft's order comes to them batch by batch."""
    rng = np.random.default_rng(SEED)
    num_samples = num_steps * GLOBAL_BATCH_SIZE
    line_of = np.random.default_rng([SEED, 0]).permutation(num_samples)  # SftDataset's order of one pass
    rows: list[list[int]] = [[] for _ in range(num_samples)]
    for step in range(num_steps):
        for index, length in enumerate(rng.permutation(batch_lengths()).tolist()):
            rows[line_of[step * GLOBAL_BATCH_SIZE + index]] = rng.integers(0, 257, length + 1).tolist()
    path.write_text("".join(f"{json.dumps({'tokens': row})}\n" for row in rows))


def figures(name: str, *, turns: Recorded, alone: Recorded, calibration: Calibration) -> dict[str, Any]:
    first = len(POLICIES) * WARM_UP_ROUNDS
    steps = list(zip(*turns.ranks, strict=True))
    policy_steps = [step for index, step in enumerate(steps) if index >= first and policy_of_step(index) == name]
    check_sizes(policy_steps, cp_size=POLICIES[name])
    run_steps = list(zip(*alone.ranks, strict=True))[WARM_UP_ROUNDS:]
    schedule = plan(
        batch_lengths(),
        cp_size=POLICIES[name],
        cost_model=calibration.cost_model(),
        topology=Topology(NUM_RANKS // 2, cp_size=2, dynamic_cp=True),
        limits=Limits(CAP),
    )
    compared = Recorded([turns.steps[: len(alone.steps)]], turns.output)
    return {
        "cpu_seconds": [max(rank["cpu_seconds"] for rank in step) for step in policy_steps],
        "seconds": [max(rank["seconds"] for rank in step) for step in policy_steps],
        "alone_cpu_seconds": [max(rank["cpu_seconds"] for rank in step) for step in run_steps],
        "predicted_seconds": schedule.predicted_cost / UNITS_PER_SECOND,
        "mean_cp_size": float((schedule.lengths * schedule.cp_size_grid.reshape(-1)[schedule.microbatch_of]).sum())
        / float(schedule.lengths.sum()),
        "loss_difference": largest_difference(alone, reference=compared, key="lm_loss"),
    }


def check_sizes(steps: Sequence[Sequence[Mapping[str, Any]]], *, cp_size: int | None) -> None:
    """Assert that these steps ran at the sizes of their policy."""
    for step in steps:
        sizes = {size for rank in step for size in rank["cp_sizes"]}
        assert sizes == {cp_size} if cp_size else len(sizes) > 1, f"sizes {sizes} where the policy has {cp_size}"
