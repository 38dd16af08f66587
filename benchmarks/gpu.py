"""For whoever has GPUs: both rates of a run on them, equality over NCCL, the gain, and a profile to contribute.

    scripts/bench gpu                         on all GPUs of this machine (at most 8), with Transformer Engine
    scripts/bench gpu --device cpu --quick    the same to its end on two CPU ranks, a minute or two

A recorded run is fitted, and its seconds plan another one, beside the same samples packed where they were loaded. One
GPU has the rates alone. The profile is a row for `measured` in benchmarks/rates.json; `scripts/bench rates --write`
then puts it into the package.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from training_run import Recorded, largest_difference, train

from benchmarks.equality import command as equality
from benchmarks.publish import RAW, Measured, fresh, num_gpus, table
from megatron_balance.cli import main as megatron_balance
from megatron_balance.cost.calibration import Calibration
from megatron_balance.runtime.process import environment

TITLE = "One's own GPUs"
WARM_UP_STEPS = 2
SIZES = {
    "cuda": "--num-layers 4 --hidden-size 4096 --ffn-hidden-size 12288 --num-attention-heads 32 --num-query-groups 8 "
    "--kv-channels 128",
    "cpu": "--num-layers 2 --hidden-size 64 --ffn-hidden-size 192 --num-attention-heads 4 --num-query-groups 2",
}
"""Layers of an 8B model; vocabulary and optimizer stay small."""

LONGEST = {"cuda": 32768, "cpu": 1024}
BATCH = {"cuda": 16, "cpu": 8}
"""Samples of a step for each rank."""

PRECISIONS = {"bf16": "--bf16", "fp8": "--bf16 --fp8-format hybrid", "fp32": ""}
PACKED, BALANCED = "packed where they were loaded", "by the run's own seconds"
EQUALITY_ON_CPU = "DP2 / fp32 / plain / by FLOPs in place"


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="of the ranks (default: cuda)")
    parser.add_argument("--precision", choices=tuple(PRECISIONS), help="of the run (default: bf16, on a CPU fp32)")
    parser.add_argument("--steps", type=int, default=12, help="of each run (default: 12)")
    parser.add_argument("--equality-minutes", type=float, default=20, help="no run of it starts later (default: 20)")
    parser.add_argument("--quick", action="store_true", help="five steps, and one layout for equality")


def measure(args: argparse.Namespace) -> Measured:
    """Records, fits, trains by the fit, and compares with stock."""
    num_ranks = min(num_gpus(), 8) if args.device == "cuda" else 2
    precision = args.precision or ("bf16" if args.device == "cuda" else "fp32")
    steps, folder = 5 if args.quick else args.steps, RAW / f"gpu-{args.device}"
    fresh(folder)
    longest, batch = LONGEST[args.device], BATCH[args.device] * num_ranks
    _write_data(folder / "data.jsonl", num_samples=batch * steps, longest=longest)
    common = (
        f"{SIZES[args.device]} {PRECISIONS[precision]} --seq-length {longest} --max-position-embeddings {longest} "
        f"--global-batch-size {batch} --train-iters {steps} --data-path {folder / 'data.jsonl'} "
        f"--use-dynamic-batch-size --max-tokens-per-gpu {longest}"
    )

    def run(name: str, flags: str) -> Recorded:
        words = f"{common} {flags}".split()
        return train(folder / name, words, num_ranks=num_ranks, device=args.device, timeout_seconds=900)

    by_flops, seconds = "--balance-data --balance-by-flops", folder / "seconds.json"
    run("recorded", f"{by_flops} --balance-record {folder / 'record'}")
    if megatron_balance(["fit", str(folder / "record"), "--out", str(seconds)]):
        return Measured({}, problems=["the record was not fitted"])
    costs = Calibration.read(seconds)
    figures: dict[str, Any] = {"num_ranks": num_ranks, "precision": precision, "held_out_error": costs.held_out_error}
    figures["rates"] = {name: costs.origin.get(name) for name in ("linear_tflops", "attention_tflops")}
    profile = _profile(costs, precision=precision, device=args.device)
    (folder / "profile.json").write_text(json.dumps(profile, indent=1) + "\n")
    sys.stdout.write(f"A profile to contribute, for `measured` in benchmarks/rates.json: {folder / 'profile.json'}\n")
    problems: list[str] = []
    if num_ranks > 1:
        packed, balanced = run("packed", ""), run("balanced", f"{by_flops} --balance-cost {seconds}")
        figures["seconds"] = {PACKED: _step_seconds(packed), BALANCED: _step_seconds(balanced)}
        figures["loss_difference"] = largest_difference(balanced, reference=packed, key="lm_loss")
        compared = equality.measure(
            argparse.Namespace(
                whole=False,
                only=EQUALITY_ON_CPU if args.device == "cpu" else "DP2 / " if args.quick else "",
                device=args.device,
                minutes=args.equality_minutes,
                folder=folder / "equality",
                anew=True,
            )
        )
        figures["equality"] = {name: compared.figures[name] for name in ("num_runs", "num_missing", "num_problems")}
        problems += compared.problems
    return Measured(figures, raw=profile, problems=problems)


def _write_data(path: Path, *, num_samples: int, longest: int) -> None:
    """Random tokens of lengths from a heavy tail, every sixteenth sample as long as can be."""
    rng = np.random.default_rng(1)
    lengths = np.clip(rng.lognormal(np.log(longest / 24), 1.2, num_samples), 32, longest - 1).astype(int)
    lengths[::16] = longest - 1
    rows = (rng.integers(0, 257, length + 1).tolist() for length in lengths.tolist())
    path.write_text("".join(f"{json.dumps({'tokens': row})}\n" for row in rows))


def _step_seconds(run: Recorded) -> float:
    steps = list(zip(*run.ranks, strict=True))[WARM_UP_STEPS:]
    return statistics.median(max(rank["seconds"] for rank in step) for step in steps)


def _profile(costs: Calibration, *, precision: str, device: str) -> dict[str, dict[str, Any]]:
    """The row of a profile, by its name; what was not measured is absent."""
    with_ = environment(device)
    gpu = with_["device"].removeprefix("NVIDIA ").split()[0] if device == "cuda" else "cpu"
    versions = with_["versions"]
    software = ", ".join(f"{name} {versions[name]}" for name in sorted(versions))
    rates = {name: costs.origin[name] for name in ("linear_tflops", "attention_tflops") if name in costs.origin}
    row = {"gpu": gpu, "precision": precision, "models": "dense", "software": software, "kind": "own run"}
    row |= {"source": "scripts/bench gpu", **{name: float(f"{rate:.3g}") for name, rate in rates.items()}}
    if costs.held_out_error is not None:
        row["held_out"] = [round(costs.held_out_error, 4)]
    return {f"{gpu.lower()}-{precision}-own-run": row}


def section(figures: Mapping[str, Any]) -> str:
    rates = figures["rates"]
    rows: list[tuple[str, str]] = [
        (name, "not told apart" if rate is None else f"{rate:.4g}") for name, rate in rates.items()
    ]
    rows += [("held-out error", f"{figures['held_out_error']:.1%}")]
    rows += [(f"seconds a step, {way}", f"{value:.4g}") for way, value in figures.get("seconds", {}).items()]
    if "seconds" in figures:
        rows.append(("gain", f"{figures['seconds'][PACKED] / figures['seconds'][BALANCED]:.2f}×"))
        rows.append(("loss off by", f"{figures['loss_difference']:.1e}"))
        equality = figures["equality"]
        rows.append(
            ("runs of the equality set, and those not equal", f"{equality['num_runs']}, {equality['num_problems']}")
        )
    return f"""{figures["num_ranks"]} ranks, {figures["precision"]}.

{table("measured | value", rows)}"""
