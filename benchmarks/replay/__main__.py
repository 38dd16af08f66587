"""Replays every data-parallel rank of the seed's setups on one device. Run by scripts/bench_gpu.sh.

python -m benchmarks.replay --out benchmarks/results       on a GPU: calibrates, replays, writes replay_<device>.md
python -m benchmarks.replay --toy                          tiny models, seconds on a CPU, through all the same code
python -m benchmarks.replay --gains-only                   predictions alone, no device
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.planner.ablation import RESULTS
from benchmarks.planner.device_rates import ASSUMED_DEVICES, measured_devices
from benchmarks.planner.options import add_options, lengths_folder
from benchmarks.planner.report import installed_versions, make_header
from benchmarks.replay.device import PACKAGES, ReplayDevice
from benchmarks.replay.gains import predict_gains
from benchmarks.replay.gains_report import write_gains
from benchmarks.replay.length_sets import RARE_LONG
from benchmarks.replay.report import Replay, SetupReplay, write_replay
from benchmarks.replay.run import batches_in_turn, replay_setup
from benchmarks.replay.setups import ReplaySetup, seed_setups, toy_setups
from megatron_balance.cost.calibration import Calibration


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the replay; returns the exit status. `None` takes the process's command line."""
    args = _parser().parse_args(arguments)
    folder = lengths_folder(args)
    args.out.mkdir(parents=True, exist_ok=True)
    header = make_header(command=args.command, real_lengths=folder is not None)
    setups = toy_setups() if args.toy else seed_setups(num_layers=args.num_layers)
    if not args.toy:
        devices = (ASSUMED_DEVICES[1], ASSUMED_DEVICES[2], *measured_devices(RESULTS))
        write_gains(
            predict_gains(setups, devices=devices, lengths_folder=folder), setups=setups, header=header, out=args.out
        )
        _announce(f"wrote gains.md and gains.json to {args.out}")
    if args.gains_only:
        return 0

    if args.toy and args.device is None:
        args.device = "cpu"
    if args.steps is None:
        args.steps = 2 if args.toy else 10
    # On a CPU Megatron warns of its random states in every micro-batch.
    logging.getLogger("megatron").setLevel(logging.ERROR)
    device = ReplayDevice.find(args.device)
    replays = [*_replays(setups, args=args, device=device, folder=folder)]
    write_replay(
        Replay(
            header=replace(header, versions=header.versions | installed_versions(PACKAGES)),
            device=device,
            repeats=args.repeats,
            seed=args.seed,
            setups=replays,
        ),
        out=args.out,
        name=f"{_prefix(args)}replay_{device.slug}",
    )
    _announce(f"wrote {_prefix(args)}replay_{device.slug}.md and .json to {args.out}")
    return 0


def _replays(
    setups: Sequence[ReplaySetup], *, args: argparse.Namespace, device: ReplayDevice, folder: Path | None
) -> Iterator[SetupReplay]:
    """Calibrates every model once and replays every setup in an equal part of the time that is left."""
    calibrations: dict[str, Calibration] = {}
    budget = args.time_budget
    for index, setup in enumerate(setups):
        if setup.model not in calibrations:
            _announce(f"calibrating {setup.model}, {setup.shape.num_layers} layers, on {device.name}")
            calibration = device.calibrate(
                setup.shape,
                max_tokens=max(other.cap for other in setups if other.model == setup.model),
                repeats=args.repeats,
                seed=args.seed,
            )
            model = setup.model.lower().replace(" ", "_")
            calibration.write(args.out / f"{_prefix(args)}calibration_{device.slug}_{model}.json")
            calibrations[setup.model] = calibration
        started = time.monotonic()
        names = setup.length_names if args.toy else (*setup.length_names, RARE_LONG)
        with device.running(setup.shape, seed=args.seed) as timer:
            yield replay_setup(
                setup,
                timer=timer,
                calibration=calibrations[setup.model],
                batches=[*batches_in_turn(names, setup=setup, num_steps=args.steps, lengths_folder=folder)],
                repeats=args.repeats,
                seconds=budget / (len(setups) - index),
                announce=_announce,
            )
        budget -= time.monotonic() - started


def _prefix(args: argparse.Namespace) -> str:
    """A toy's calibration is no device's: the ablation must not find it."""
    return "toy_" if args.toy else ""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="scripts/bench_gpu.sh", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--toy", action="store_true", help="tiny models, few ranks and samples; on the CPU by default")
    parser.add_argument("--gains-only", action="store_true", help="only predict which lengths the gains need")
    parser.add_argument("--device", choices=("cuda", "cpu"), help="by default the GPU where there is one")
    parser.add_argument("--num-layers", type=int, default=4, help="layers of each model (default %(default)s)")
    parser.add_argument("--steps", type=int, help="global batches of each setup (default 10, of a toy 2)")
    parser.add_argument("--repeats", type=int, default=2, help="runs of each micro-batch (default %(default)s)")
    parser.add_argument(
        "--time-budget",
        type=float,
        default=1200.0,
        metavar="SECONDS",
        help="for the steps of all setups; calibrating comes on top (default %(default)s)",
    )
    parser.add_argument("--seed", type=int, default=0, help="of the calibration's draws (default %(default)s)")
    add_options(parser, command="scripts/bench_gpu.sh")
    return parser


def _announce(line: str) -> None:
    sys.stderr.write(line + "\n")


if __name__ == "__main__":
    sys.exit(main())
