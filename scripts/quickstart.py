"""See it work, without a GPU: the same training under five policies, side by side.

Trains a small model with Megatron's own loop on four ranks that share a core (on several, a rank is slower while others
work): a few steps with all flags, then policies that take turns, step by step (policy_turns.py). `megatron-balance fit`
learns seconds from the first batches and predicts the others, which run twice: the lesser seconds count. Writes a
table, result.json, a record (measured.jsonl) and report.html, and fails where balancing changes a loss.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from training_run import ALLOWANCES, ENVIRONMENT, RECORD_STEPS, ROOT, Recorded, share_a_core, train

from megatron_balance import CostModel
from megatron_balance.cli.terminal import print_table
from megatron_balance.cost.calibration import UNITS_PER_SECOND, Calibration
from megatron_balance.hooking import quiet_imports
from megatron_balance.record import RunRecord, StepRecord, line_of, read_record, text_of
from megatron_balance.report import run_figures, write_page

with quiet_imports():
    from policy_turns import POLICIES, policy_of_step
    from sft_dataset import builtin_samples

OUT = ROOT / "build" / "quickstart"
NUM_RANKS = 4
GLOBAL_BATCH_SIZE = 24
SEQ_LENGTH = 4096
FITTED = slice(1, 5)  # rounds, each of a global batch under all policies; the first pays for allocations
MEASURED = (slice(5, 10), slice(10, 15))  # the same batches twice
NUM_COMPARED = 2  # steps of each policy, whose losses must be those of the run with all flags
TRAIN_ITERS = {"turns": MEASURED[-1].stop * len(POLICIES), "all_flags": NUM_COMPARED * len(POLICIES)}
SEED = 5  # of the samples
MAX_FIT_ERROR = 0.04  # 0.015 to 0.039 in runs that were predicted within 3 points, 0.045 and 0.062 in others

FLAGS = (
    # Of 4,096 tokens attention costs about four times what all else does, as of 180,000 in an 8B model.
    "--num-layers 1 --hidden-size 64 --kv-channels 32 --num-attention-heads 6 --num-query-groups 2 "
    f"--ffn-hidden-size 192 --seq-length {SEQ_LENGTH} --max-position-embeddings {SEQ_LENGTH} --seed {SEED} "
    f"--global-batch-size {GLOBAL_BATCH_SIZE} --use-dynamic-batch-size "
    f"--max-tokens-per-gpu {SEQ_LENGTH} --balance-data --balance-by-flops --balance-dynamic-cp "
    # On a CPU attention runs at about this many times the rate of all else (fits: 2.6, 2.7); on a GPU below 1.
    "--balance-attention-rate 2.6 "
    # Rounding grows from step to step, the faster the larger the steps.
    "--lr 1e-4 --min-lr 1e-4"
).split()


def main() -> int:
    """Train, compare, and report; the exit code says whether the losses agree."""
    data = OUT / "data.jsonl"
    OUT.mkdir(parents=True, exist_ok=True)
    _write_data(data)
    all_flags = _train("all_flags", script=RECORD_STEPS, data=data)
    share_a_core()
    turns = _train("turns", script=ROOT / "scripts" / "policy_turns.py", data=data)
    calibration = _fitted()
    costs, error = calibration.cost_model(), calibration.held_out_error or 0.0
    policies = _figures(turns, all_flags=all_flags, costs=costs)
    (OUT / "result.json").write_text(json.dumps({"policies": policies, "fit_error": error}, indent=1) + "\n")
    _print_table(policies)
    measured = _measured_record(turns, costs=costs)
    write_record(OUT / "measured.jsonl", measured)
    write_page(run_figures(measured), out=OUT / "report.html", speedup=policies["dynamic-cp"]["cpu_speedup"])
    print("Written to build/quickstart/result.json. Steps rank by rank: open build/quickstart/report.html in a browser")
    if error > MAX_FIT_ERROR:
        print(f"The fit is off by {error:.1%}: something else ran, speeds may be as much off. Try again when idle.")
    worst, allowed = max(figures["max_loss_difference"] for figures in policies.values()), ALLOWANCES["fp32"].loss
    if worst > allowed:
        print(f"Losses differ by {worst:.1e} relatively: more than {allowed:.1e}.")
    return int(worst > allowed)


def _write_data(path: Path) -> None:
    """Global batches of samples drawn at random, each of them for every policy, in the order of pretrain_sft."""
    corpus = [sample for sample in builtin_samples() if sample.learned[1 : SEQ_LENGTH + 1].any()]
    drawn = np.random.default_rng(SEED).permutation(len(corpus))[: MEASURED[0].stop * GLOBAL_BATCH_SIZE]
    rounds = drawn.reshape(-1, GLOBAL_BATCH_SIZE)
    rounds = np.concatenate([rounds, *(rounds[MEASURED[0]] for _ in MEASURED[1:])])
    batches = np.repeat(rounds, len(POLICIES), axis=0).ravel()
    rows = [""] * batches.size
    # SftDataset shuffles by this.
    for place, index in zip(np.random.default_rng([SEED, 0]).permutation(batches.size), batches, strict=True):
        sample = corpus[index]
        rows[place] = json.dumps({"tokens": sample.tokens.tolist(), "loss_mask": sample.learned.tolist()})
    path.write_text("\n".join(rows) + "\n")


def _train(name: str, *, script: Path, data: Path) -> Recorded:
    flags = [*FLAGS, "--data-path", str(data), "--balance-record", str(OUT / f"{name}_record")]
    flags += ["--train-iters", str(TRAIN_ITERS[name])] + ["--no-balance-overlap"] * (name == "turns")

    def show(line: str) -> None:
        iteration = re.search(r"iteration\s+(\d+)/", line)
        if iteration and sys.stdout.isatty():
            print(f"\r{name}: step {iteration[1]} of {TRAIN_ITERS[name]}", end="\r", flush=True)

    return train(OUT / name, flags, num_ranks=NUM_RANKS, script=script, on_line=show)


def _fitted() -> Calibration:
    """The seconds of micro-batches, as a user would fit them to the first steps of a training."""
    first, path = OUT / "first_turns.jsonl", OUT / "seconds.json"
    info, recorded, *_ = read_record(OUT / "turns_record")
    fitted = range(FITTED.start * len(POLICIES), FITTED.stop * len(POLICIES))
    write_record(first, RunRecord(info, tuple(step for step in recorded if step.iteration - 1 in fitted)))
    command = [sys.executable, "-m", "megatron_balance", "fit", str(first), "--out", str(path)]
    subprocess.run(command, env=os.environ | ENVIRONMENT, check=True, stdout=subprocess.DEVNULL)
    return Calibration.read(path)


def write_record(path: Path, record: RunRecord) -> None:
    """A record in one file."""
    lines = [record.info.line()]
    for step in record.steps:
        lines.append(line_of(step))
        for rank, (seconds, sizes) in enumerate(zip(step.seconds, step.cp_size_grid, strict=True)):
            rank_line = {"iteration": step.iteration, "rank": rank, "seconds": seconds[sizes > 0].tolist()}
            lines.append({"kind": "seconds", **rank_line})
    path.write_bytes(b"".join(map(text_of, lines)))


def _measured_record(turns: Recorded, *, costs: CostModel) -> RunRecord:
    """The measured batches under all flags, each as it ran quicker, with the fitted seconds as its costs."""
    info, recorded, *_ = read_record(OUT / "turns_record")
    busiest = {step.iteration: _cpu_seconds(turns)[:, step.iteration - 1].max() for step in recorded}
    steps_of = {step.iteration - 1: step for step in recorded}
    indices = [index for index in range(TRAIN_ITERS["turns"]) if policy_of_step(index) == "dynamic-cp"]
    meetings = zip(*(indices[meeting] for meeting in MEASURED), strict=True)
    quicker = [min((steps_of[index] for index in pair), key=lambda step: busiest[step.iteration]) for pair in meetings]
    texts = {key: text.replace(f"{ROOT}/", "") for key, text in info.environment.items() if isinstance(text, str)}
    info = replace(info, cost_model=costs, cost_name="seconds", environment={**info.environment, **texts})
    steps = sorted(quicker, key=lambda step: step.iteration)
    return RunRecord(info, tuple(replace(step, cost_model=costs) for step in steps))


def _cpu_seconds(turns: Recorded) -> NDArray[np.float64]:
    """`[num_ranks, num_steps]` of whole steps."""
    return np.array([[step["cpu_seconds"] for step in rank] for rank in turns.ranks])


def _figures(turns: Recorded, *, all_flags: Recorded, costs: CostModel) -> dict[str, dict[str, Any]]:
    """Figures of each policy for the table and result.json; means over the measured global batches."""
    plans = {step.iteration - 1: step for step in read_record(OUT / "turns_record").steps}
    cpu_seconds = _cpu_seconds(turns)
    steps_of = {name: [i for i in range(TRAIN_ITERS["turns"]) if policy_of_step(i) == name] for name in POLICIES}
    policies: dict[str, dict[str, Any]] = {}
    for policy, steps in steps_of.items():
        recorded = [plans[i] for i in steps_of["packed" if policy == "stock" else policy]]
        planned = [plan.stock() for plan in recorded] if policy == "stock" else recorded
        passes = _passes(planned, costs=costs)
        # Stock steps are in no record: their passes differ from packed ones as the fit says.
        seconds = np.array([np.nansum(plan.seconds, axis=1) for plan in recorded]).T
        seconds += passes - _passes(recorded, costs=costs)
        # Planning, moving samples, gradients and optimizer, on every rank: a prediction does not count them.
        other_seconds = float(np.median((cpu_seconds[:, steps] - seconds)[:, FITTED]))
        measured = np.min([cpu_seconds[:, steps[meeting]] for meeting in MEASURED], axis=0)
        predicted = passes[:, MEASURED[0]]
        compared = [(turns.steps[i]["lm_loss"], all_flags.steps[i]["lm_loss"]) for i in steps[:NUM_COMPARED]]
        policies[policy] = figures = {
            "busiest_cpu_seconds": float(measured.max(axis=0).mean()),
            "outside_cpu_seconds": other_seconds,
            "predicted_cpu_seconds": float(predicted.max(axis=0).mean()),
            "planned_max_over_mean": float((predicted.max(axis=0) / predicted.mean(axis=0)).mean()),
            "cpu_seconds": measured.tolist(),
            "num_microbatches": [turns.steps[index]["num_microbatches"] for index in steps[MEASURED[0]]],
            "max_loss_difference": max(abs(balanced_loss / stock_loss - 1) for balanced_loss, stock_loss in compared),
        }
        figures["cpu_speedup"] = policies["stock"]["busiest_cpu_seconds"] / figures["busiest_cpu_seconds"]
        figures["predicted_speedup"] = policies["stock"]["predicted_cpu_seconds"] / figures["predicted_cpu_seconds"]
    return policies


def _passes(plans: list[StepRecord], *, costs: CostModel) -> NDArray[np.float64]:
    """`[num_ranks, num_steps]` seconds of micro-batches, as fitted."""
    return np.array([replace(plan, cost_model=costs).costs.sum(axis=1) for plan in plans]).T / UNITS_PER_SECOND


def _print_table(policies: dict[str, dict[str, Any]]) -> None:
    print(f"\n{NUM_RANKS} ranks, {GLOBAL_BATCH_SIZE} samples a step, at most {SEQ_LENGTH} tokens each")
    rows: list[dict[str, str]] = []
    before = policies["stock"]
    for name, figures in policies.items():
        counts = sorted(set(figures["num_microbatches"]))
        row = {"policy": name, "busiest rank, CPU s": f"{figures['busiest_cpu_seconds']:.3f}"}
        row["max/mean"] = f"{figures['planned_max_over_mean']:.4f}"
        row["micro-batches"] = f"{counts[0]}–{counts[-1]}" if len(counts) > 1 else str(counts[0])
        row |= {"speed": f"{figures['cpu_speedup']:.2f}x", "predicted, at most": f"{figures['predicted_speedup']:.2f}x"}
        row["gain"] = f"{figures['cpu_speedup'] / before['cpu_speedup']:.2f}x"
        rows.append(row | {"loss off by": f"{figures['max_loss_difference']:.1e}"})
        before = figures
    print_table(list(rows[0]), [list(row.values()) for row in rows])
    print("Gain: over the row above, the one flag that it adds. Predicted: of forward and backward; of a step with")
    other_seconds = policies["dynamic-cp"]["outside_cpu_seconds"] / policies["dynamic-cp"]["busiest_cpu_seconds"]
    print(f"all flags {other_seconds:.0%} is outside of both (planning, moving samples, gradients, optimizer).\n")


if __name__ == "__main__":
    sys.exit(main())
