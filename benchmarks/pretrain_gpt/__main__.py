"""Trains with Megatron's pretrain_gpt.py, unedited, stock and balanced, in many layouts, and compares.

    scripts/upstream/check_megatron.sh CHECKOUT                   every layout, both kinds of data
    scripts/upstream/check_megatron.sh CHECKOUT --only 'DP2 CP2 / --sft' EP2     those whose name holds one of these
    scripts/upstream/check_megatron.sh CHECKOUT --speed           seconds of --sft, stock and by flag, instead
    scripts/upstream/check_megatron.sh CHECKOUT --publish         also writes benchmarks/results/pretrain_gpt*

The exit status is 1 where a balanced run is not as it must be, 0 else.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from forked import import_once, train_forked
from training_run import ROOT, Recorded, RunFailed, train

from benchmarks.pretrain_gpt import speed
from benchmarks.pretrain_gpt.cases import DATA, LAYOUTS, NUM_STEPS, ONE_RANK, Case, cases, data_flags
from benchmarks.pretrain_gpt.data import PretrainData, write_data
from benchmarks.pretrain_gpt.outcomes import Outcome, Verdict, judge, judge_refusal, last_error
from benchmarks.pretrain_gpt.report import Row, line, publish, row_of, table_of

TIMEOUT_SECONDS = 900
"""Of one run; a loaded machine is slow, a hang is for ever."""


def main() -> int:
    """Run, compare, report."""
    parser = argparse.ArgumentParser(prog="scripts/upstream/check_megatron.sh", description=__doc__.splitlines()[0])
    parser.add_argument("tree", type=Path, help="a copy of the checkout, its dataset helpers built")
    parser.add_argument("--name", required=True, help="of the checkout, for the report")
    parser.add_argument("--only", nargs="*", default=(), metavar="TEXT", help="runs whose name holds one of these")
    parser.add_argument("--publish", action="store_true", help="write benchmarks/results/pretrain_gpt*")
    parser.add_argument("--speed", action="store_true", help="time --sft, stock and with each flag, instead")
    args = parser.parse_args()
    if args.speed:
        return _speed(args)
    runs = Runs(args.tree, folder=args.tree.parent / "runs")
    rows: list[Row] = []
    for case in cases(args.only):
        rows.append(row_of(runs.verdict(case)))
        sys.stdout.write(line(rows[-1]) + "\n")
        sys.stdout.flush()
    sys.stdout.write("\n" + table_of(rows))
    if args.publish:
        publish(rows, checkout=_checkout(args.name), folder=ROOT / "benchmarks" / "results")
    return 0 if rows and all(row["good"] for row in rows) else 1


def _speed(args: argparse.Namespace) -> int:
    """Time `--sft` and report."""
    folder = args.tree.parent / "speed"
    shutil.rmtree(folder, ignore_errors=True)
    data = write_data(folder / "data", whole=True)

    def run(flags: Sequence[str]) -> Recorded:
        script = {"TRAINING_SCRIPT": str(args.tree / "pretrain_gpt.py")}
        every = [*data_flags("--sft", data), "--split", "100,0,0", "--vocab-size", "258", *flags]
        return train(folder / "run", every, num_ranks=2, environment=script, timeout_seconds=TIMEOUT_SECONDS)

    result = speed.measure(run)
    sys.stdout.write(speed.table_of(result))
    if args.publish:
        speed.publish(result, checkout=_checkout(args.name), folder=ROOT / "benchmarks" / "results")
    return 0 if speed.is_equal(result) else 1


def _checkout(name: str) -> str:
    """The name and its release, without the commit of whatever folder the runs were started in."""
    from megatron.core.package_info import __version__

    return f"{name} ({__version__.partition('+')[0]})"


@dataclass
class Runs:
    """Runs each case once.

    Attributes:
        tree: a copy of the checkout, from which Megatron is imported.
        folder: of the runs; emptied.
    """

    tree: Path
    folder: Path
    outcomes: dict[Case, Outcome] = field(default_factory=dict)

    def __post_init__(self) -> None:
        import_once(also=("pretrain_gpt",))
        shutil.rmtree(self.folder, ignore_errors=True)
        self.data: PretrainData = write_data(self.folder / "data")

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
            begun = self._run(
                Case(ONE_RANK, DATA[-1], model=model),
                ["--train-iters", "1", "--save", str(folder), "--save-interval", "1"],
            )
            if begun.recorded is None:
                sys.exit(f"one rank does not train: {begun.error}")
        return folder

    def _run(self, case: Case, flags: Sequence[str]) -> Outcome:
        record, flags = self.folder / "run", [*case.flags(self.data), *flags]
        script = {"TRAINING_SCRIPT": str(self.tree / "pretrain_gpt.py")}
        limits = {"num_ranks": case.num_ranks, "timeout_seconds": TIMEOUT_SECONDS}
        while True:
            shutil.rmtree(record, ignore_errors=True)
            try:
                if case.launched:
                    return Outcome(train(record, flags, environment=script, **limits))
                return Outcome(train_forked(record, flags, environment=script, **limits).recorded)
            except RunFailed as error:
                # Another program may take a port between its choice and its use.
                if "EADDRINUSE" not in str(error):
                    return Outcome(error=last_error(str(error)))


if __name__ == "__main__":
    sys.exit(main())
