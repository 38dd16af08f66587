"""Settings that a run finds in its first steps: the costs of `--balance-cost auto`.

    the seconds of a step's micro-batches → rank 0 → a fit → all ranks → the plan of the next step

As such a step ends its ranks send what they measured, while no thread prepares the next one. Rank 0 decides and all
ranks take its answer, by its data-parallel group and then in each model replica.

Invariants: all ranks take the same integers between the same two steps; what was found is in every checkpoint, and
until then what it is found from, so that a run that is killed goes on as it would have; what fails on rank 0 leaves the
settings as they are.
"""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch.distributed as dist
from numpy.typing import NDArray

from megatron_balance.cost.calibration import UNITS_PER_SECOND, Calibration
from megatron_balance.errors import BalanceError
from megatron_balance.mcore.prepare import BalancedStep
from megatron_balance.mcore.setup.rules import TUNED_STEPS
from megatron_balance.mcore.setup.settings import RunCosts, Settings
from megatron_balance.mcore.telemetry import run_info
from megatron_balance.planner import build_data_schedule
from megatron_balance.record import RunRecord, StepRecord, line_of, step_of, text_of
from megatron_balance.record.fit import fit_record
from megatron_balance.runtime.comm import all_gather_row
from megatron_balance.runtime.failure import Failure, attempt, broadcast_text
from megatron_balance.runtime.log import log_info, warn_once

STATE = "megatron_balance_state"
"""The name among Megatron's arguments, which are in every checkpoint, of a text: what rank 0 has found."""

State = dict[str, Any]
"""`num_steps` that were asked for, `end` the last of them, `costs` as `Calibration.content`; on rank 0 alone `steps`,
lines of a record with `nanoseconds`, from which costs are found."""


class Autotuner:
    """Finds the settings of a run; every rank makes one.

    `leaders` is the group of the ranks that lead their model replicas, None elsewhere; `replica` those of this rank's,
    None for this one alone. `costs_of` makes costs of a `calibration`.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        leaders: dist.ProcessGroup | None,
        replica: dist.ProcessGroup | None,
        costs_of: Callable[..., RunCosts],
        args: Namespace | None,
    ) -> None:
        self._settings, self._costs_of, self._args = settings, costs_of, args
        self._leaders, self._replica, self._decides = leaders, replica, dist.get_rank() == 0
        self._state: State = {}
        self._newest = 0

    def begin(self, iteration: int) -> Settings:
        """The settings of a step."""
        if self._state:
            return self._settings
        text, num_steps = getattr(self._args, STATE, None), self._settings.tuned_steps

        def decide() -> State:
            state = json.loads(text or "{}")
            if "costs" in state:
                Calibration.from_content(state["costs"])
                log_info("--balance-cost auto: plans by the costs that the run had found at its checkpoint.")
            is_new = state.get("num_steps") != num_steps
            return state | {"num_steps": num_steps, "end": iteration - 1 + num_steps, "steps": []} if is_new else state

        self._agree(decide, otherwise={"end": 0})
        return self._settings

    def measures(self, iteration: int) -> bool:
        """True if settings are found from this step, among others, and not of an earlier run of it."""
        return max(self._state["end"] - TUNED_STEPS, self._newest) < iteration <= self._state["end"]

    def end(self, step: BalancedStep, *, iteration: int, seconds: NDArray[np.float64] | None) -> Settings:
        """The settings after a step; `[num_microbatches]` seconds of this rank, where they were measured."""
        self._newest = iteration
        schedule, rows = step.schedule, np.zeros((0, 0), dtype=np.int64)
        if self._leaders is not None and schedule is not None:
            row = np.zeros(schedule.cp_size_grid.shape[1], dtype=np.int64)
            if seconds is not None and len(seconds) == step.num_microbatches:
                row[: len(seconds)] = seconds * 1e9
            rows = all_gather_row(row, group=self._leaders, operation="the seconds of all ranks (gather)")

        def decide() -> State:
            assert schedule is not None, "rank 0 plans"
            grid = np.zeros_like(schedule.cp_size_grid)
            grid[:: len(grid) // len(rows)] = rows  # of the first context-parallel rank of each replica
            line = line_of(StepRecord.from_schedule(schedule, iteration=iteration)) | {"nanoseconds": grid.ravel()}
            steps = [*self._state["steps"], text_of(line).decode()]
            if iteration < self._state["end"]:
                return self._state | {"steps": steps}
            return self._state | {"steps": []} | self._fitted([json.loads(text) for text in steps])

        self._agree(decide, otherwise=self._state)
        return self._settings

    def _agree(self, decide: Callable[[], State], *, otherwise: State) -> None:
        """Take what rank 0 decides, or `otherwise` where it fails."""
        before, text = self._state.get("costs"), ""
        if self._decides:
            decision = attempt(decide)
            if isinstance(decision, Failure):
                warn_once(f"--balance-cost auto keeps the settings as they are: {decision.text}")
            self._state = otherwise if isinstance(decision, Failure) else decision
            text = json.dumps({name: value for name, value in self._state.items() if name != "steps"})
        for group in filter(None, (self._leaders, self._replica)):
            text = broadcast_text(text, group=group, operation="what rank 0 has found for --balance-cost auto")
        if not self._decides:
            self._state = json.loads(text)
        if self._args is not None:
            setattr(self._args, STATE, json.dumps(self._state))
        costs = self._state.get("costs")
        if costs is not None and costs != before:
            self._settings = replace(self._settings, costs=self._costs_of(calibration=Calibration.from_content(costs)))
            for line in self._settings.costs.log_lines:
                log_info(line)

    def _fitted(self, lines: Sequence[State]) -> State:
        """The costs of these steps, unless those in use predict the steps that were left out of the fit better."""
        info, steps = run_info(self._settings, args=self._args), list[StepRecord]()
        for line in lines:
            step = step_of(line, info=info)
            seconds = np.array(line["nanoseconds"]).reshape(step.cp_size_grid.shape) / 1e9
            steps.append(replace(step, seconds=seconds))
        said = f"--balance-cost auto, steps {steps[0].iteration} to {steps[-1].iteration}:"
        try:
            fit, calibration = fit_record(RunRecord(info, tuple(steps)))
        except BalanceError as error:
            log_info(f"{said} costs stay as they are: {error}")
            return {}
        errors = f"{fit.error:.1%} on steps that were left out of the fit, the costs in use by {fit.planned_error:.1%}"
        if fit.error > fit.planned_error:
            log_info(f"{said} costs stay as they are: fitted ones are off by {errors}.")
            return {}
        costs, found = self._costs_of(calibration=calibration), calibration.costs
        terms = (found.per_microbatch, found.linear + found.expert_linear, found.quadratic)
        launch, token, squared = (f"{attoseconds / UNITS_PER_SECOND:.2g} s" for attoseconds in terms)
        rate, before = calibration.origin, self._settings.costs.attention_rate
        rates = f", attention at {rate['attention_tflops'] / rate['linear_tflops']:.2g} times the rate of all else"
        rates += f" ({before:g} before)"
        log_info(
            f"{said} a micro-batch takes {launch}, a token {token} and a squared token {squared}"
            f"{rates if 'linear_tflops' in rate else ''}; off by {errors}. Plans follow from step "
            f"{steps[-1].iteration + 1} on; the last one would have taken {self._gain(steps[-1], costs):.1%} less time."
        )
        return {"costs": calibration.content()}

    def _gain(self, step: StepRecord, costs: RunCosts) -> float:
        """The part of a step's predicted time that a plan by these costs saves."""
        settings = self._settings
        schedule = build_data_schedule(
            step.segments,
            num_segments=step.num_segments,
            image_patches=step.images,
            cost_model=costs.model,
            topology=settings.topology,
            limits=settings.limits,
            objective=settings.objective,
            algorithm=settings.algorithm,
            home_ranks=step.home_ranks,
            move_samples=settings.balance_data,
        )
        ran, planned = replace(step, cost_model=costs.model), StepRecord.from_schedule(schedule, iteration=0)
        after, before = (plan.imbalance(plan.costs) * plan.costs.sum() for plan in (planned, ran))
        return 1 - float(after / before)
