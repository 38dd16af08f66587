"""Trains with pretrain_sft, each step under the policy whose turn it is, and records every step: for the quickstart.

    torchrun … tests/kit/cpu_shim.py scripts/policy_turns.py RECORD_DIR ARGS

ARGS turn `--balance-dynamic-cp` on, at a context-parallel size of 1. One process group runs all policies, so a
rank or a while that is slower is so for each of them. Plans of one size are run by the executor of dynamic sizes. Needs
`--no-balance-overlap`: a stock step reads the data loader itself, and must find nothing pulled ahead.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from dataclasses import replace
from typing import Any, TextIO
from unittest import mock

from record_steps import SCHEDULE, Function, recorded, train_wrapped

from megatron_balance import CostModel, DataSchedule, Limits, Topology, build_data_schedule
from megatron_balance.mcore import plan_process
from megatron_balance.mcore.run import current
from megatron_balance.planner import Problem

POLICIES = ("stock", "packed", "balance-data", "by-flops", "dynamic-cp")


def policy_of_step(step: int) -> str:
    """The policy of a step, counted from 0; the first of a round moves on from round to round."""
    rounds, turn = divmod(step, len(POLICIES))
    return POLICIES[(turn + rounds) % len(POLICIES)]


def main() -> None:
    """Record while the script trains."""
    train_wrapped(_in_turns)


def _in_turns(train_step: Function, *, out: TextIO) -> Function:
    signature, steps = inspect.signature(train_step), itertools.count()

    @functools.wraps(train_step)
    def wrapper(*positional: Any, **keywords: Any) -> Any:
        policy = policy_of_step(next(steps))
        bound = signature.bind(*positional, **keywords)
        if policy == "stock":
            balanced = current()
            if balanced is not None:
                balanced.last_step = None
            bound.arguments[SCHEDULE] = bound.arguments[SCHEDULE].args[0]  # Megatron's, inside the hook's partial
        with mock.patch.object(plan_process, "build_data_schedule", functools.partial(plan_of, policy)):
            return recorded(train_step, out=out, policy=policy)(*bound.args, **bound.kwargs)

    return wrapper


def plan_of(
    policy: str, lengths: Any, *, cost_model: CostModel, topology: Topology, limits: Limits, home_ranks: Any, **_: Any
) -> DataSchedule:
    """A step's plan under a policy, for the executor of dynamic sizes."""
    shared: dict[str, Any] = {"limits": limits, "home_ranks": home_ranks}
    options: dict[str, Any] = {"cost_model": cost_model, "topology": topology, **shared}
    if policy == "dynamic-cp":
        return build_data_schedule(lengths, **options)
    cost_model = replace(cost_model, cp_exchange=0) if policy == "by-flops" else CostModel.tokens()
    at_one = build_data_schedule(
        lengths, cost_model=cost_model, topology=topology.with_cp_size(1), move_samples=policy != "packed", **shared
    )
    sizes = at_one.cp_size_grid
    return DataSchedule.from_assignment(Problem.of(lengths, **options), at_one.microbatch_of, sizes).check()


if __name__ == "__main__":
    main()
