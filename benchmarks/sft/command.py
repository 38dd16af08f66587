"""Megatron's own pretrain_gpt.py, unedited, stock and balanced: speed of `--sft`, and equality in many layouts.

`scripts/check upstream CHECKOUT` makes the environment and a copy of the checkout with its helpers built, and runs
this: the layouts, or with `--speed` the speed. What is known of the other, and of other checkouts, stays published.
"""

from __future__ import annotations

import argparse
import importlib
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from forked import import_once, train_forked
from training_run import ALLOWANCES, Recorded, RunFailed, train

from benchmarks.publish import Measured, fresh, made_by, published, say, table
from benchmarks.sft import speed, stocks
from benchmarks.sft.cases import DATA, DOCUMENTS, LAYOUTS, NUM_STEPS, ONE_RANK, SEQ_LENGTH, Case, cases, data_flags
from benchmarks.sft.data import PretrainData, write_data
from benchmarks.sft.outcomes import Outcome, Verdict, judge, judge_refusal, last_error, logged_numbers

TITLE = "Megatron's pretrain_gpt.py"
TIMEOUT_SECONDS = 900
"""Of one run; a loaded machine is slow, a hang is for ever."""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("tree", type=Path, help="a copy of the checkout, its dataset helpers built")
    parser.add_argument("--name", required=True, help="of the checkout, for the results")
    parser.add_argument("--only", nargs="*", default=(), metavar="TEXT", help="runs whose name holds one of these")
    parser.add_argument("--stocks", action="store_true", help="time each kind of stock, beside what compare predicts")
    parser.add_argument("--speed", action="store_true", help="time --sft, stock and with each flag, instead")


def measure(args: argparse.Namespace) -> Measured:
    """Trains, and puts the figures of this checkout beside those of others."""
    known = published("sft")
    figures: dict[str, Any] = {part: dict(known.get(part, {})) for part in ("speed", "stocks", "layouts")}
    if args.stocks:
        measured = _stocks(args.tree)
        figures["stocks"][args.name] = {"made": made_by("scripts/check upstream CHECKOUT --stocks"), "kinds": measured}
        return Measured(figures | {"made": known["made"]}, raw=measured)  # that of the other parts
    if args.speed:
        measured = speed.measure_speed(_runner(args.tree))
        figures["speed"][args.name] = measured
        allowed = ALLOWANCES["fp32"].loss
        problems = [name for name, row in measured.items() if row["loss_difference"] > allowed]
        return Measured(figures, raw=measured, problems=[f"the losses of {name!r} differ" for name in problems])
    runs = Runs(args.tree, folder=args.tree.parent / "runs")
    verdicts = list(_verdicts(runs, only=args.only))
    if not args.only:
        figures["layouts"][args.name] = {
            verdict.case.name: [verdict.loss, verdict.grad_norm, *_notes(verdict)] for verdict in verdicts
        }
    bad = [f"{verdict.case.name}: {verdict.says}" for verdict in verdicts if not verdict.good]
    return Measured(figures, raw=[asdict(verdict) for verdict in verdicts], problems=bad)


def _verdicts(runs: Runs, *, only: Sequence[str]) -> Iterator[Verdict]:
    for case in cases(only):
        verdict = runs.verdict(case)
        say(f"{case.name}: {verdict.says}, loss {verdict.loss}, gradient norm {verdict.grad_norm}")
        yield verdict


def _notes(verdict: Verdict) -> list[str]:
    """What is more than `equal to stock`."""
    notes = [] if verdict.says == "equal" else [verdict.says]
    return notes + (["against one rank: stock fails"] if verdict.reference.startswith(ONE_RANK) else [])


def _runner(tree: Path) -> speed.Runner:
    folder = fresh(tree.parent / "speed")
    data = write_data(folder / "data", seq_length=speed.SEQ_LENGTH, whole=True, in_a_row=(1,))

    def run(flags: Sequence[str]) -> Recorded:
        script = {"TRAINING_SCRIPT": str(tree / "pretrain_gpt.py")}
        every = [*data_flags("--sft", data), *flags]
        ranks: dict[str, Any] = {"num_ranks": speed.NUM_RANKS, "timeout_seconds": TIMEOUT_SECONDS}
        return train(folder / "run", every, environment=script, **ranks)

    return run


def _stocks(tree: Path) -> dict[str, Any]:
    import_once(also=("pretrain_gpt",))
    folder = fresh(tree.parent / "stocks")
    data = {
        kind: write_data(folder / "data" / kind, seq_length=stocks.SEQ_LENGTH, whole=True, in_a_row=in_a_row)
        for kind, in_a_row in stocks.KINDS.items()
    }

    def run(kind: str, flags: Sequence[str]) -> Recorded:
        dataset_flags = data_flags(DATA[1] if kind == "masked-documents" else DATA[0], data[kind])
        script: dict[str, Any] = {"TRAINING_SCRIPT": str(tree / "pretrain_gpt.py")}
        limits: dict[str, Any] = {"num_ranks": stocks.NUM_RANKS, "timeout_seconds": TIMEOUT_SECONDS}
        shutil.rmtree(folder / "run", ignore_errors=True)
        return train_forked(folder / "run", [*dataset_flags, *flags], environment=script, **limits)

    def lengths(kind: str) -> str:
        paths = data[kind]
        return str(paths.documents if kind == "masked-documents" else paths.conversations.with_name("lengths.jsonl"))

    return stocks.measure_stocks(run, lengths=lengths, folder=folder)


@dataclass
class Runs:
    tree: Path
    folder: Path
    outcomes: dict[Case, Outcome] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _hide_metadata()
        import_once(also=("pretrain_gpt",))
        importlib.import_module("stand_ins").mtp_attention()  # it imports Megatron, which comes after the shim
        shutil.rmtree(self.folder, ignore_errors=True)
        self.data: PretrainData = write_data(self.folder / "data", seq_length=SEQ_LENGTH)

    def verdict(self, case: Case) -> Verdict:
        """Of a balanced run; what it is compared with runs where it has not yet."""
        ours = self._outcome(case)
        if LAYOUTS[case.layout].refused:
            return judge_refusal(case, ours=ours)
        stock = self._outcome(case.stock)
        one_rank = None if stock.recorded else self._outcome(case.on_one_rank)
        return judge(case, ours=ours, stock=stock, one_rank=one_rank)

    def _outcome(self, case: Case) -> Outcome:
        if case not in self.outcomes:
            weights = ["--load", str(self._weights(case.model)), "--finetune", "--no-load-optim", "--no-load-rng"]
            self.outcomes[case] = self._run(case, ["--train-iters", str(NUM_STEPS), *weights])
        return self.outcomes[case]

    def _weights(self, model: str) -> Path:
        """The checkpoint that every run of a model starts from: of one rank after one step."""
        folder = self.folder / model
        if not folder.exists():
            save = ["--train-iters", "1", "--save", str(folder), "--save-interval", "1"]
            begun = self._run(Case(ONE_RANK, DOCUMENTS[-1], model=model), save)
            if begun.recorded is None:
                sys.exit(f"one rank does not train: {begun.error}")
        return folder

    def _run(self, case: Case, flags: Sequence[str]) -> Outcome:
        record, flags = self.folder / "run", [*case.flags(self.data), *flags]
        script = {"TRAINING_SCRIPT": str(self.tree / "pretrain_gpt.py")}
        limits: dict[str, Any] = {"num_ranks": case.num_ranks, "timeout_seconds": TIMEOUT_SECONDS}
        while True:
            shutil.rmtree(record, ignore_errors=True)
            try:
                if case.launched:
                    ran = train(record, flags, environment=script, **limits)
                    return Outcome(ran, logged=logged_numbers(ran.output))
                per_token = ["--calculate-per-token-loss"] if case.by_microbatch else []
                ran = train_forked(record, flags, environment=script, leave_out=per_token, **limits)
                last = (record / f"rank{case.num_ranks - 1}.log").read_text(errors="replace")
                return Outcome(ran, logged=logged_numbers(last))
            except RunFailed as error:
                # Another program may take a port between its choice and its use.
                if "EADDRINUSE" not in str(error):
                    return Outcome(error=last_error(str(error)))


def _hide_metadata() -> None:
    """As where a checkout is on PYTHONPATH and no wheel was installed: the runs are forks of this process."""
    stock = metadata.Distribution.from_name

    def from_name(name: str) -> metadata.Distribution:
        if name == "megatron-core":
            raise metadata.PackageNotFoundError(name)
        return stock(name)

    metadata.Distribution.from_name = from_name  # type: ignore[method-assign]


def section(figures: Mapping[str, Any]) -> str:
    speeds = "\n\n".join(f"{name}:\n\n{_speed(policies)}" for name, policies in figures["speed"].items())
    return f"""### Speed of SFT

Trains a GPT of two layers on {speed.NUM_RANKS} data-parallel CPU ranks, on conversations made of Python's standard
library, one a row of {speed.SEQ_LENGTH} tokens. Seconds are CPU seconds of the busiest rank, the mean of
{speed.NUM_STEPS - speed.WARM_UP_STEPS} steps; a factor is that of the row above over this one. *Without padding*
(`--use-dynamic-batch-size`) packs samples instead of filling rows up.

{speeds}

### Gains over each stock

{stocks.NUM_RUNS} runs of a GPT of two layers on {stocks.NUM_RANKS} CPU ranks, {stocks.GLOBAL_BATCH_SIZE} rows of
{stocks.SEQ_LENGTH} tokens a step, {stocks.NUM_STEPS - stocks.WARM_UP_STEPS} steps after a warm-up of
{stocks.WARM_UP_STEPS}: CPU seconds that the slowest rank spends in forward and backward passes, stock over balanced by
FLOPs, beside what `compare` predicts for these steps from the lengths and the seconds fitted to the first run. Measured
is the median of all runs; in brackets the gains of single runs.

{_stocks_table(figures.get("stocks", {}))}

### Layouts

A tiny model on CPU ranks over gloo trains {NUM_STEPS} steps from one set of weights, stock and balanced by FLOPs.
A cell is the largest relative difference of a step's loss and of its gradient norm; equal is within
{ALLOWANCES["fp32"].loss:.1e}, and for all that Megatron logs but the time.
*Documents*: `--dataloader-inter-document-masking`; *padded rows*: `--balance-unpad`. *1*: against one rank, because
stock fails in this layout.

{_layouts(figures["layouts"])}"""


def _stocks_table(checkouts: Mapping[str, Mapping[str, Any]]) -> str:
    rows = [
        (
            *(checkout, kind, f"{row['predicted']:.3f}×"),
            f"{row['measured']:.3f}× ({min(row['runs']):.3f} to {max(row['runs']):.3f})",
            f"{row['below']:.1%}",
        )
        for checkout, measured in checkouts.items()
        for kind, row in measured["kinds"].items()
    ]
    made = "; ".join(
        f"{checkout}: `{made['command']}`, {made['date']}, revision {made['revision']}, {made['device']}"
        for checkout, made in ((checkout, measured["made"]) for checkout, measured in checkouts.items())
    )
    return f"{made}.\n\n{table('checkout | stock | predicted | measured | below', rows)}"


def _speed(policies: Mapping[str, Mapping[str, float]]) -> str:
    stock = previous = policies["stock"]["cpu_seconds"]
    packed = policies["without padding"]["cpu_seconds"]
    rows: list[tuple[str, ...]] = []
    for name, row in policies.items():
        seconds = row["cpu_seconds"]
        factor = "–" if name == "stock" else f"{previous / seconds:.2f}×"
        difference = "–" if name == "stock" else f"{row['loss_difference']:.1e}"
        speeds = (f"{stock / seconds:.2f}×", f"{packed / seconds:.2f}×")
        rows.append((name, f"{seconds:.2f}", factor, *speeds, difference))
        previous = seconds
    columns = "policy | busiest rank, CPU s a step | this flag's factor | speed over stock | over packing"
    return table(f"{columns} | largest loss difference", rows)


def _layouts(checkouts: Mapping[str, Mapping[str, Any]]) -> str:
    kinds: dict[str, str] = dict(zip(DATA, ("`--sft`", "documents", "padded rows"), strict=True))
    columns = [(checkout, kind) for checkout in checkouts for kind in DATA]
    rows: dict[str, dict[tuple[str, str], str]] = {}
    for checkout, runs in checkouts.items():
        for name, cells in runs.items():
            layout, kind, _, *variants = name.split(" / ")
            rows.setdefault(", ".join([layout, *variants]), {})[checkout, kind] = _cell(*cells)
    head = " | ".join(["layout", *(f"{checkout}, {kinds[kind]}" for checkout, kind in columns)])
    lines = [[layout, *(cells.get(column, "not run") for column in columns)] for layout, cells in rows.items()]
    return table(head, lines, align="l" * (len(columns) + 1))


def _cell(loss: float | None, grad_norm: float | None, *notes: str) -> str:
    differences = [] if loss is None else [f"{loss:.0e} / {grad_norm:.0e}"]
    return ", ".join(differences + ["1" if "one rank" in text else text.partition(",")[0] for text in notes])
