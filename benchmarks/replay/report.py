"""Writes the replay as JSON and Markdown: measured step times beside the predicted ones."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.markdown import table
from benchmarks.planner.report import Header, header_lines
from benchmarks.replay.device import ReplayDevice
from benchmarks.replay.policies import OURS_CALIBRATED, OURS_FLOPS, TOKEN_SUM_KK
from benchmarks.replay.setups import ReplaySetup
from benchmarks.replay.steps import Microbatch, ReplayedStep
from benchmarks.results_file import page_of, write_results
from megatron_balance import CostModel
from megatron_balance.cost.calibration import Calibration


@dataclass(frozen=True)
class SetupReplay:
    """One setup on the device.

    Attributes:
        setup: the run.
        calibration: of its model.
        steps: one for each global batch and policy.
        microbatches: every micro-batch that was measured, with its seconds.
    """

    setup: ReplaySetup
    calibration: Calibration
    steps: Sequence[ReplayedStep]
    microbatches: Mapping[Microbatch, float]

    def policies(self) -> list[str]:
        """Names, in the order of the results."""
        return list(dict.fromkeys(step.policy for step in self.steps))

    def total(self, policy: str, figure: str, *, lengths: str | None = None) -> float:
        """A figure of `ReplayedStep` summed over the steps of a policy, of one length set or all."""
        of_policy = [step for step in self.steps if step.policy == policy and lengths in (None, step.lengths)]
        return sum(getattr(step, figure) for step in of_policy)

    def saved(self, policy: str, figure: str, *, lengths: str | None = None) -> float:
        """The part of token-sum Karmarkar-Karp's time that a policy saves."""
        return 1 - self.total(policy, figure, lengths=lengths) / self.total(TOKEN_SUM_KK, figure, lengths=lengths)

    def calibration_error(self) -> float:
        """Median relative error of the calibration on the micro-batches that were measured."""
        pairs = [(self.calibration(list(lengths)), seconds) for lengths, seconds in self.microbatches.items()]
        return statistics.median(abs(predicted / seconds - 1) for predicted, seconds in pairs)

    def flops_error(self) -> float:
        """The same of FLOPs at the one rate that is right in total."""
        pairs = [(_flops(self.setup.cost_model, lengths), seconds) for lengths, seconds in self.microbatches.items()]
        rate = sum(seconds for _, seconds in pairs) / sum(flops for flops, _ in pairs)
        return statistics.median(abs(flops * rate / seconds - 1) for flops, seconds in pairs)


def _flops(cost_model: CostModel, lengths: Microbatch) -> int:
    return sum(cost_model(length) for length in lengths)


@dataclass(frozen=True)
class Replay:
    """All that one run measured.

    Attributes:
        header: command, day, machine, versions, lengths.
        device: what ran the micro-batches.
        repeats: runs of each micro-batch, the quickest of which counts.
        seed: of the calibration's draws.
        setups: one each.
    """

    header: Header
    device: ReplayDevice
    repeats: int
    seed: int
    setups: Sequence[SetupReplay]


def write_replay(replay: Replay, *, out: Path, name: str) -> None:
    """Writes NAME.md and NAME.json into a folder."""
    content = {
        "header": asdict(replay.header),
        "device": asdict(replay.device),
        "repeats": replay.repeats,
        "seed": replay.seed,
        "setups": [_fields(one) for one in replay.setups],
    }
    lines = [*_head(replay), *_summary(replay), *(line for one in replay.setups for line in _tables(one))]
    write_results(name, content, report=lambda _: page_of(lines), out=out)


def _fields(one: SetupReplay) -> dict[str, Any]:
    setup = one.setup
    return {
        "name": setup.name,
        "model": setup.model,
        "shape": asdict(setup.shape),
        "topology": asdict(setup.topology),
        "max_tokens_per_gpu": setup.max_tokens_per_gpu,
        "global_batch_size": setup.global_batch_size,
        "objective": setup.objective,
        "goal": setup.goal,
        "num_microbatches_measured": len(one.microbatches),
        "calibration_error": one.calibration_error(),
        "flops_error": one.flops_error(),
        "saved": {policy: one.saved(policy, "seconds") for policy in one.policies()},
        "steps": [asdict(step) for step in one.steps],
    }


def _head(replay: Replay) -> list[str]:
    device = replay.device
    return [
        f"# Replay on {device.name}",
        "",
        *header_lines(replay.header)[:-1],
        f"- device: {device.name} ({device.kind}), {device.dtype}, nothing recomputed; seed {replay.seed}",
        "",
        "One device runs the micro-batches of every data-parallel rank, forward and backward, one after another.",
        "Step time: the slowest rank's sum (*step*), or the sum over slots of the slowest rank (*microbatch*). All",
        f"plans of a step are measured in one run, in turn; each micro-batch runs {replay.repeats} times and its",
        "quickest run counts; micro-batches with the same lengths share a measurement. Times are CUDA events on a GPU,",
        "CPU seconds of the process on a CPU. Moving data between ranks and the optimiser are not replayed.",
        "",
        "Models are megatron-core layers at the model's width, fewer of them, with as large a part of the vocabulary:",
        "linear and quadratic work keep their ratio. Nothing is parallel within a rank, and experts run where the",
        "token is, so plans are made for that.",
        "",
        "**saved**: part of the train time of first-fit + KK on tokens (slime's `--balance-data`, the base line of its",
        "pull request) that a plan saves; *by FLOPs* and *by calibration* are what was expected.",
        "",
    ]


def _summary(replay: Replay) -> list[str]:
    rows: list[tuple[str, ...]] = []
    for one in replay.setups:
        goal, measured = one.setup.goal, one.saved(OURS_CALIBRATED, "seconds")
        verdict = "–" if goal is None else "yes" if measured >= goal else "no"
        cells = [
            one.setup.name,
            "–" if goal is None else f"{goal:.1%}",
            f"{one.saved(OURS_FLOPS, 'by_flops'):.1%}",
            f"{one.saved(OURS_FLOPS, 'seconds'):.1%}",
            f"{one.saved(OURS_CALIBRATED, 'by_calibration'):.1%}",
            f"**{measured:.1%}**",
            verdict,
        ]
        rows.append(tuple(cells))
    columns = "setup | bar | ours, FLOPs: by FLOPs | measured | ours, calibrated: by calibration | measured | bar met"
    lines = ["## Expected, and what came out", "", table(columns, rows, align="lrrrrrl")]
    if all(one.setup.goal is None for one in replay.setups):
        return [*lines, "", "A toy: it shows that all of this runs, and says nothing of a GPU.", ""]
    return [
        *lines,
        "",
        "The bar is what the pull request's own runs saved. Its lengths are not published; gains.md says which are",
        "needed.",
        "",
    ]


def _tables(one: SetupReplay) -> list[str]:
    setup, sets = one.setup, list(dict.fromkeys(step.lengths for step in one.steps))
    num_steps = len(one.steps) // len(one.policies())
    lines = [
        f"## {setup.name}: {setup.model} width, {setup.shape.num_layers} layers, {setup.objective}",
        "",
        f"{num_steps} steps of {setup.global_batch_size} samples of {', '.join(sets)}, {setup.max_tokens_per_gpu} "
        f"tokens a GPU; {len(one.microbatches)} different micro-batches. Median error on them: calibration "
        f"{one.calibration_error():.1%}, FLOPs at one rate {one.flops_error():.1%}.",
        "",
    ]
    rows: list[tuple[str, ...]] = []
    for policy in one.policies():
        saved = [f"{one.saved(policy, figure):.1%}" for figure in ("seconds", "by_flops", "by_calibration")]
        cells = [
            f"{1e3 * one.total(policy, 'seconds') / num_steps:.2f}",
            f"{1e3 * one.total(policy, 'by_calibration') / num_steps:.2f}",
            *saved,
            f"{one.total(policy, 'num_microbatches') / num_steps:.1f}",
            f"{one.total(policy, 'num_over_cap'):.0f}",
        ]
        rows.append((policy, *cells))
    columns = "planned with | ms a step | by calibration | saved | by FLOPs | by calibration | slots | over cap"
    saved_of_sets = [
        (policy, *(f"{one.saved(policy, 'seconds', lengths=name):.1%}" for name in sets)) for policy in one.policies()
    ]
    return [*lines, table(columns, rows), "", table(" | ".join(["saved, measured", *sets]), saved_of_sets), ""]
