"""Trains with pretrain_sft under three policies, a step each in turn, and records every step: for the quickstart.

    FIRST_POLICY=N torchrun … tests/kit/cpu_launch.py tests/kit/policy_turns.py RECORD_DIR ARGS

ARGS turn balancing by FLOPs on. Step i runs under POLICIES[(i + N) % 3]; lines are those of record_steps.py with the
policy's name. One process group runs all policies, so a rank that is slower than in another run is so for each of
them. Over the runs with N = 0, 1 and 2 every global batch meets every policy, with the weights that step has in all.

Needs `--no-balance-overlap`: a stock step reads the data loader itself, and must find nothing pulled ahead.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import os
from dataclasses import replace
from typing import Any, TextIO

from record_steps import recorded, train_wrapped

from megatron_balance.cost.model import CostModel
from megatron_balance.hooking import Function
from megatron_balance.mcore import hooks

POLICIES = ("stock", "balance_data", "balance_by_flops")
SCHEDULE = "forward_backward_func"
"""The parameter of train_step that has Megatron's schedule, wrapped by the hook."""


def main() -> None:
    """Record while the script trains."""
    train_wrapped(_in_turns, why="runs each step under the policy whose turn it is", parameters=(SCHEDULE,))


def _in_turns(train_step: Function, *, out: TextIO) -> Function:
    signature = inspect.signature(train_step)
    policies = itertools.islice(itertools.cycle(POLICIES), int(os.environ["FIRST_POLICY"]), None)
    by_flops: dict[str, Any] = {}

    @functools.wraps(train_step)
    def wrapper(*positional: Any, **keywords: Any) -> Any:
        balanced = hooks.current()
        assert balanced is not None, "the flags balance the run"
        planner = balanced.prefetcher.planner
        by_flops.setdefault("config", planner.config)
        by_flops.setdefault("cost_model", planner.cost_model)
        policy = next(policies)
        bound = signature.bind(*positional, **keywords)
        if policy == "stock":
            balanced.last_step = None
            bound.arguments[SCHEDULE] = bound.arguments[SCHEDULE].args[0]  # Megatron's, inside the hook's partial
        elif policy == "balance_data":
            planner.config = replace(by_flops["config"], balance_by_flops=False)
            planner.cost_model = CostModel.tokens()
        else:
            planner.config, planner.cost_model = by_flops["config"], by_flops["cost_model"]
        return recorded(train_step, out=out, policy=policy)(*bound.args, **bound.kwargs)

    return wrapper


if __name__ == "__main__":
    main()
