"""Your own training command, stock and balanced by turns: step time, tokens/s, MFU, peak memory and losses.

    scripts/bench cluster -- SCRIPT ARGS                           on the GPUs of this machine
    scripts/bench cluster --torchrun "--nnodes 2 --node-rank 0 --rdzv-endpoint HOST:29500" -- SCRIPT ARGS
    scripts/bench cluster --device cpu --ranks 2 -- SCRIPT ARGS    on CPU ranks, kernels replaced

SCRIPT is any Megatron script, ARGS are its own. Without a balance flag in ARGS balanced runs have --balance; stock runs
have none. No run writes a checkpoint: --save and its like are left out. On several nodes each runs this, on a folder
that all see. --text adds data, the standard library's sources as documents of bytes (--vocab-size 258).
"""

from __future__ import annotations

import argparse
import html
import os
import shlex
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from training_run import ALLOWANCES, Recorded, read_records, search_path, train

from benchmarks.overlay import overlay
from benchmarks.publish import RAW, Measured, made_by, num_gpus, say, table
from benchmarks.sft.cases import DOCUMENTS, MAX_TOKENS, data_flags
from benchmarks.sft.data import write_data
from megatron_balance.mcore.setup.flags import add_balance_args
from megatron_balance.record import RunRecord, read_record
from megatron_balance.report import run_figures, write_page

TITLE = "One's own cluster"
PEAKS = {"A100": 312.0, "H100": 989.0, "H200": 989.0, "B200": 2250.0}
"""TFLOP/s in bf16 without sparsity, by NVIDIA's data sheets."""

OUTPUTS = ("--save", "--save-interval", "--tensorboard-dir", "--wandb-project", "--balance-record")
WARM_UP_STEPS = 3

_PAGE = """<!doctype html><meta charset="utf-8"><title>{title}</title>
<style>:root {{ color-scheme: light dark }} body {{ font: 16px sans-serif; margin: 2em auto; max-width: 920px }}
td, th {{ padding: .3em 1em .3em 0; text-align: left }} pre {{ white-space: pre-wrap }} svg {{ width: 100% }}</style>
<h1>{title}</h1><table><tr><th></th><th>stock</th><th>balanced</th><th></th></tr>{rows}</table>
<p>{says} Each step of the balanced run, rank by rank: <a href="report.html">report.html</a>.</p>{losses}
<pre>{command}</pre><p>{made}</p>
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="of the ranks (default: cuda)")
    parser.add_argument("--ranks", type=int, help="of this node (default: its GPUs)")
    parser.add_argument("--torchrun", default="--standalone", metavar="FLAGS", help="of the rendezvous, in one word")
    parser.add_argument("--steps", type=int, default=20, help="of each run (default: 20)")
    parser.add_argument("--turns", type=int, default=2, help="runs of each kind (default: 2)")
    parser.add_argument("--peak", type=float, metavar="TFLOPS", help="of a GPU, for the MFU (known for some)")
    parser.add_argument("--text", action="store_true", help="train on the standard library's sources")
    parser.add_argument("--picture", type=Path, metavar="SVG", help="also draw the losses into this file")
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="new folder of runs and page (default: build/bench/cluster, emptied)"
    )
    parser.add_argument("--minutes", type=float, default=60, help="after which a run is ended (default: 60)")
    parser.add_argument("command", nargs="+", metavar="SCRIPT ARGS", help="what trains, after --")


def measure(args: argparse.Namespace) -> Measured:
    if args.steps <= WARM_UP_STEPS:
        raise SystemExit(f"--steps is {args.steps}: the first {WARM_UP_STEPS} do not count, give more.")
    folder: Path = args.out or RAW / "cluster"
    if args.out is None:
        shutil.rmtree(folder, ignore_errors=True)
    elif (folder / "record").exists():
        raise SystemExit(f"--out is {folder}: it has the record of another run, name a new folder.")
    folder.mkdir(parents=True, exist_ok=True)
    script, *words = args.command
    commands = flags_of_runs(words)
    path = os.pathsep.join([str(Path(script).resolve().parent), search_path()])  # Megatron may lie beside the script
    rendezvous, num_ranks = shlex.split(args.torchrun), args.ranks or num_gpus()
    num_nodes = _values_of(["--nnodes"], rendezvous)[0].nnodes
    shared = ["--train-iters", str(args.steps)]
    if args.text:
        text = write_data(folder / "text", seq_length=MAX_TOKENS, whole=True, in_a_row=(1,), num_samples=None)
        shared += [*data_flags(next(kind for kind in DOCUMENTS if kind in words), text), "--split", "100,0,0"]
    runs: dict[str, list[Recorded]] = {name: [] for name in commands}
    for turn in range(args.turns):
        for name in sorted(commands, reverse=turn % 2 == 0):
            record = ["--balance-record", str(folder / "record")] * (name == "balanced" and turn == 0)
            run = train(
                folder / name,
                [*commands[name], *shared, *record],
                num_ranks=num_ranks,
                device=args.device,
                environment={"TRAINING_SCRIPT": script, "PYTHONPATH": path},
                timeout_seconds=60 * args.minutes,
                rendezvous=rendezvous,
                common="",
            )
            run = replace(run, ranks=read_records(folder / name, num_ranks=num_ranks * int(num_nodes or 1)))
            runs[name].append(run)
            say(f"{name}, turn {turn + 1} of {args.turns}: {len(run.steps)} steps")
    figures = figures_of_runs(runs, record=read_record(folder / "record"), device=args.device, peak=args.peak)
    figures["command"] = shlex.join([Path(script).name, *words])
    losses = overlay(*([step["lm_loss"] for step in runs[name][0].steps] for name in ("stock", "balanced")))
    if args.picture:
        args.picture.write_text(losses, encoding="utf-8")
    _write_pages(figures, losses=losses, device=args.device, folder=folder)
    sys.stdout.write(f"{line(figures)}\nPage: {folder / 'index.html'}\n")
    allowed = ALLOWANCES["fp32" if not {"--bf16", "--fp16"} & set(words) else "bf16"].loss
    off = figures["loss_differences"][0]
    problems = [f"the first step's loss is off by {off:.1e}, more than {allowed:.1e}"] if off > allowed else []
    return Measured(
        figures, raw={name: [run.ranks for run in turns] for name, turns in runs.items()}, problems=problems
    )


def _values_of(flags: Sequence[str], words: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Values of these flags, and the words without them."""
    parser = argparse.ArgumentParser(allow_abbrev=False, add_help=False)
    for flag in flags:
        parser.add_argument(flag)
    return parser.parse_known_args(words)


def flags_of_runs(words: Sequence[str]) -> dict[str, list[str]]:
    """Flags of stock and of balanced runs, from those of the user."""
    kept = _values_of(OUTPUTS, words)[1]
    balance = add_balance_args(argparse.ArgumentParser(allow_abbrev=False, add_help=False))
    # Not the function of this parser: it checks flags among those of Megatron.
    stock = argparse.ArgumentParser.parse_known_args(balance, kept)[1]
    return {"stock": stock, "balanced": kept if stock != kept else [*kept, "--balance"]}


def figures_of_runs(
    runs: Mapping[str, Sequence[Recorded]], *, record: RunRecord, device: str, peak: float | None
) -> dict[str, Any]:
    """Figures of all turns; the time of a step is that of the slowest rank, the median of its turns."""
    gpu, num_gpus = record.info.environment["device"], record.info.topology.num_gpus
    if device == "cuda" and peak is None:
        peak = next((known for name, known in PEAKS.items() if name in gpu), None)
    clock, after = "seconds" if device == "cuda" else "cpu_seconds", slice(WARM_UP_STEPS, None)
    tokens = sum(int(step.lengths.sum()) for step in record.steps[after])
    flops = float(run_figures(record).model_flops[after].sum())
    figures: dict[str, Any] = {"gpu": gpu, "num_ranks": num_gpus, "clock": clock, "peak": peak}
    losses: dict[str, Any] = {}
    for name, turns in runs.items():
        each = np.array([[[row[clock] for row in rank[after]] for rank in run.ranks] for run in turns])
        seconds = float(np.median(each.max(axis=1), axis=0).sum())
        memory = [rank[-1]["peak_bytes"] / 2**30 for run in turns for rank in run.ranks if "peak_bytes" in rank[-1]]
        losses[name] = np.array([[step["lm_loss"] for step in run.steps] for run in turns])
        figures[name] = {
            "seconds": seconds / each.shape[-1],
            "tokens_per_second": tokens / seconds,
            "mfu": None if peak is None or np.isnan(flops) else flops / (seconds * num_gpus * peak * 1e12),
            "peak_gib": max(memory) if memory else None,
            "losses": losses[name][0, [0, -1]].tolist(),
        }
    differences = np.abs(losses["balanced"] / losses["stock"] - 1).max(axis=0)
    figures["ratio"] = figures["stock"]["seconds"] / figures["balanced"]["seconds"]
    figures["loss_differences"] = [*differences[[0, -1]].tolist(), float(differences.max())]
    return figures | {"num_steps": differences.size, "num_turns": len(runs["stock"])}


def rows(figures: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    """Name of a figure, stock, balanced, and how they compare."""
    stock, balanced = figures["stock"], figures["balanced"]
    on_gpus = figures["clock"] == "seconds"
    for name, key, form in (
        ("s a step" if on_gpus else "CPU s of the busiest rank a step", "seconds", "{:.4g}"),
        ("tokens/s", "tokens_per_second", "{:,.0f}"),
        ("MFU", "mfu", "{:.1%}"),
        ("peak memory, GiB", "peak_gib", "{:.1f}"),
    ):
        if stock[key] is None or balanced[key] is None:
            yield name, *["absent" if on_gpus else "absent: no GPU"] * 2, ""
        else:
            change = figures["ratio"] if key == "seconds" else balanced[key] / stock[key]
            yield name, form.format(stock[key]), form.format(balanced[key]), f"{change:.3f}×"
    first, last, worst = figures["loss_differences"]
    ends = [" … ".join(f"{loss:.4f}" for loss in run["losses"]) for run in (stock, balanced)]
    yield "loss, first and last step", *ends, f"off by {first:.1e} and {last:.1e}, at most {worst:.1e}"


def line(figures: Mapping[str, Any]) -> str:
    return f"{figures['ratio']:.3f}×: " + "; ".join(
        f"{name} {before} → {after}{f' ({change})' if change else ''}" for name, before, after, change in rows(figures)
    )


def _says(figures: Mapping[str, Any]) -> str:
    return (
        f"{figures['num_steps']:,} steps on {figures['num_ranks']} ranks; runs of each kind, by turns: "
        f"{figures['num_turns']}; the first {WARM_UP_STEPS} steps do not count. The time of a step is that of "
        "its slowest rank."
    )


def _write_pages(figures: Mapping[str, Any], *, losses: str, device: str, folder: Path) -> None:
    """index.html, and the report of the balanced run."""
    of_run = run_figures(read_record(folder / "record"))
    write_page(of_run, out=folder / "report.html", peak=figures["peak"], speedup=figures["ratio"])
    made = made_by("", device=device)
    versions = ", ".join(f"{name} {version}" for name, version in made["versions"].items())
    page = _PAGE.format(
        title=f"{figures['ratio']:.3f}× with balancing",
        rows="".join(f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in row)}</tr>" for row in rows(figures)),
        says=_says(figures),
        losses=losses,
        command=html.escape(figures["command"]),
        made=html.escape(f"{made['date']}, {made['device']}, revision {made['revision']}; {versions}"),
    )
    (folder / "index.html").write_text(page, encoding="utf-8")


def section(figures: Mapping[str, Any]) -> str:
    return f"""{_says(figures)}

{table("figure | stock | balanced | balanced over stock", rows(figures))}"""
