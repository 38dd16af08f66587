"""Settings that a run finds in its first steps: `--balance-cost auto` and `--max-tokens-per-gpu auto`.

    seconds of micro-batches, memory of devices → rank 0 → costs, a cap → all ranks → the plan of the next step

As such a step ends all ranks send what they measured to rank 0, while no thread prepares the next one. It decides, and
all take its answer.

Invariants: all ranks take the same integers between the same two steps; what was found is in every checkpoint, and a
run that is resumed before that searches anew; what fails on rank 0 leaves the settings as they are, and ends the
search.
"""

from __future__ import annotations

import bisect
import contextlib
import json
import sys
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist
from numpy.typing import NDArray

from megatron_balance.cost.calibration import UNITS_PER_SECOND, Calibration
from megatron_balance.cost.model import CostModel
from megatron_balance.errors import BalanceError
from megatron_balance.mcore.prepare import BalancedStep
from megatron_balance.mcore.setup.rules import TUNED_STEPS
from megatron_balance.mcore.setup.settings import Settings
from megatron_balance.mcore.telemetry import run_info
from megatron_balance.planner import build_data_schedule
from megatron_balance.record import RunRecord, StepRecord
from megatron_balance.record.fit import fit_record
from megatron_balance.record.step import rank_slowdowns
from megatron_balance.runtime.failure import Failure, attempt
from megatron_balance.runtime.log import log_info, warn_once
from megatron_balance.topology import Limits

STATE = "megatron_balance_state"
"""The name among Megatron's arguments, which are in every checkpoint, of a text: what rank 0 has found."""

CAP_STEP = 128
"""Tokens between the caps that are compared."""

NOISE = 0.05
"""Part of what a device allows that the cap leaves as well: the next micro-batch of as many tokens may take more."""

State = dict[str, Any]
"""`end` the last of the steps, `costs` a calibration, `cap`, `speeds` of ranks; `wanted` settings, once they are found.
"""


class Autotuner:
    """Finds the settings of a run; every rank makes one, and those that lead their model replicas report seconds.

    In the folder of the record, or of checkpoints, a cap is left that was too large.
    """

    def __init__(self, settings: Settings, *, leads_replica: bool, args: Namespace | None) -> None:
        self._settings, self._leads_replica, self._args = settings, leads_replica, args
        dp_size = settings.topology.dp_size * ("speeds" in settings.tuned)
        self._wanted = [settings.tuned_steps, *settings.tuned, dp_size]
        self._first_cap = settings.limits.max_tokens_per_gpu or 0
        self._most = sys.maxsize
        folder = settings.record or getattr(args, "save", None)
        self._file = None if folder is None else Path(folder) / "out_of_memory.txt"
        self._state: State = {}
        self._steps: list[StepRecord] = []  # measured, on rank 0
        self._newest = 0

    def begin(self, iteration: int) -> Settings:
        """The settings of a step."""
        if not self._state:
            self._agree(lambda: self._first_state(iteration))
        return self._settings

    def measures(self, iteration: int) -> bool:
        """True if settings are found from this step, among others, and not of an earlier run of it."""
        return max(self._state["end"] - TUNED_STEPS, self._newest) < iteration <= self._state["end"]

    def end(
        self, step: BalancedStep, *, iteration: int, seconds: NDArray[np.float64] | None, allowed_tokens: int
    ) -> Settings:
        """The settings after a step; `[num_microbatches]` seconds of this rank, where they were measured."""
        self._newest = iteration
        row = seconds.tolist() if seconds is not None and len(seconds) == step.num_microbatches else []
        reports: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(reports, (allowed_tokens, self._leads_replica, row))

        def decide() -> State:
            schedule = step.schedule
            assert schedule is not None, "rank 0 plans"
            grid, state = np.zeros(schedule.cp_size_grid.shape), self._state.copy()
            rows = [row for _, leads_replica, row in reports if leads_replica]
            for index, row in enumerate(rows):  # of the first context-parallel rank of each replica
                grid[index * len(grid) // len(rows), : len(row)] = row
            self._steps.append(StepRecord.from_schedule(schedule, iteration=iteration, seconds=grid))
            largest = min(int(min(tokens for tokens, *_ in reports) * (1 - NOISE)), self._most)
            if "cap" in state and iteration > 1:  # before the first one ends the optimizer has no state
                # Half of the way: what takes more than its share of memory shows in time.
                state["cap"] = max(min((state["cap"] + largest) // 2, largest), self._first_cap)
            return state if iteration < state["end"] else self._last_state(state)

        self._agree(decide)
        return self._settings

    def out_of_memory(self) -> BalanceError:
        """The error where a micro-batch found no memory, and for the next start the cap to begin with."""
        cap = self._settings.limits.max_tokens_per_gpu or 1
        lower = cap * 4 // 5
        with contextlib.suppress(OSError):
            if self._file is not None:
                self._file.parent.mkdir(parents=True, exist_ok=True)
                self._file.write_text(f"{lower}\n")
        return BalanceError(
            f"Device memory ran out at --max-tokens-per-gpu {cap}, which auto had found: set {lower} in place of auto, "
            f"or start again with auto, which reads {self._file} on rank 0 and begins with it."
        )

    def _agree(self, decide: Callable[[], State]) -> None:
        """Take what rank 0 decides."""
        before = self._state
        shared: list[State] = [before]
        if dist.get_rank() == 0:
            decision = attempt(decide)
            if isinstance(decision, Failure):
                warn_once(f"auto keeps the settings as they are: {decision.text}")
                decision = self._state | {"end": 0}
            shared = [decision]
        dist.broadcast_object_list(shared)
        self._state = state = shared[0]
        if self._args is not None:
            setattr(self._args, STATE, json.dumps(state))
        settings, costs = self._settings, state.get("costs")
        if costs is not None and costs != before.get("costs"):
            calibration = Calibration(CostModel.from_dict(costs["costs"]), costs["held_out_error"], costs["origin"])
            settings = replace(settings, costs=settings.costs_of(calibration=calibration))
            for line in settings.costs.log_lines:
                log_info(line)
        if "cap" in state:
            settings = replace(settings, limits=Limits(state["cap"]))
        self._settings = replace(settings, speeds=tuple(state.get("speeds", ())))

    def _first_state(self, iteration: int) -> State:
        """What the checkpoint holds, or nothing yet; where other settings are wanted they are found anew."""
        settings, state = self._settings, json.loads(getattr(self._args, STATE, None) or "{}")
        for name in {"costs", "cap", "speeds"}.difference(settings.tuned):
            state.pop(name, None)
        if found := [name for name in settings.tuned if name in state]:
            log_info(f"auto: plans by the {' and '.join(found)} that the run had found at its checkpoint.")
        if "cap" in settings.tuned:
            if self._file is not None and self._file.exists():
                self._most = int(self._file.read_text())
                self._first_cap = min(self._first_cap, self._most)
            state["cap"] = min(state.get("cap", self._first_cap), self._most)
        if state.pop("wanted", None) == self._wanted:
            return state | {"wanted": self._wanted, "end": 0}
        state.pop("speeds", None)  # of other ranks, maybe
        return state | {"end": iteration - 1 + settings.tuned_steps}

    def _last_state(self, state: State) -> State:
        """The settings by all steps."""
        steps = self._steps
        state = state | {"wanted": self._wanted}
        if "costs" in self._settings.tuned:
            state |= self._fitted(RunRecord(run_info(self._settings, args=self._args), tuple(steps)))
        if "speeds" in self._settings.tuned:
            state["speeds"] = _speeds(steps)
        if "cap" in state:
            state["cap"] = self._smallest_cap(steps, largest=state["cap"])
        return state

    def _fitted(self, record: RunRecord) -> State:
        """The costs of these steps, unless those in use predict the steps that were left out of the fit better."""
        newest = record.steps[-1].iteration
        said = f"--balance-cost auto, steps {record.steps[0].iteration} to {newest}:"
        try:
            fit, calibration = fit_record(record)
        except BalanceError as error:
            log_info(f"{said} costs stay as they are: {error}")
            return {}
        errors = f"{fit.error:.1%} on steps that were left out of the fit, the costs in use by {fit.planned_error:.1%}"
        if fit.error > fit.planned_error:
            log_info(f"{said} costs stay as they are: fitted ones are off by {errors}.")
            return {}
        found = calibration.costs
        terms = (found.per_microbatch, found.linear + found.expert_linear, found.quadratic)
        launch, token, squared = (f"{attoseconds / UNITS_PER_SECOND:.2g} s" for attoseconds in terms)
        log_info(
            f"{said} a micro-batch takes {launch}, a token {token} and a squared token {squared}; off by "
            f"{errors}. Plans follow from step {newest + 1} on."
        )
        return {"costs": asdict(calibration)}

    def _smallest_cap(self, steps: Sequence[StepRecord], *, largest: int) -> int:
        """The smallest cap up to the largest by which these steps have as few micro-batches."""
        caps = range(self._first_cap, max(largest, self._first_cap) + 1, CAP_STEP)

        def fewer(cap: int) -> int:
            settings = replace(self._settings, limits=Limits(cap))
            return -sum(_num_microbatches(step, settings) for step in steps)

        cap = caps[bisect.bisect_left(caps, fewer(caps[-1]), key=fewer)]
        before, after = (-fewer(cap) / len(steps) for cap in (self._first_cap, cap))
        log_info(
            f"--max-tokens-per-gpu auto, steps {steps[0].iteration} to {steps[-1].iteration}: {cap} from now on, where "
            f"{largest} would leave a tenth of the fullest device free: {after:.4g} micro-batches a step, by the first "
            f"{self._first_cap} they were {before:.4g}."
        )
        return cap


def _speeds(steps: Sequence[StepRecord]) -> list[int]:
    """Of data-parallel ranks, per mille of the median one's; empty where no step was measured on all of them."""
    costs, seconds = (np.array([getattr(step, name).sum(axis=1) for step in steps]) for name in ("costs", "seconds"))
    slowdowns = rank_slowdowns(costs, seconds=seconds)
    if np.isnan(slowdowns).any():
        return []
    speeds = (1000 / slowdowns).round().astype(int)
    log_info(
        f"--balance-rank-speeds, steps {steps[0].iteration} to {steps[-1].iteration}: data-parallel ranks do from "
        f"{speeds.min() / 10:g} to {speeds.max() / 10:g} % of what the median rank does, and carry as much from now on."
    )
    return speeds.tolist()


def _num_microbatches(step: StepRecord, settings: Settings) -> int:
    """Of a rank, as these settings plan the step."""
    samples: dict[str, Any] = {"image_patches": step.images, "home_ranks": step.home_ranks, "forest": step.forest}
    return build_data_schedule(step.lengths, **samples, **settings.planning).num_microbatches
