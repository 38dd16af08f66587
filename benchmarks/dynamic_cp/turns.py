"""Trains with pretrain_sft, each step planned under the policy whose turn it is, and records every step: for gain.py.

    torchrun … tests/kit/cpu_shim.py benchmarks/dynamic_cp/turns.py RECORD_DIR ARGS

ARGS turn `--balance-dynamic-cp` on. All policies run in one process group, so a machine that is slower for a
while, or a rank that is slower in this group than in another, is so for each of them.
"""

from __future__ import annotations

import itertools
import sys
from typing import Any
from unittest import mock

import record_steps

from benchmarks.dynamic_cp.policies import POLICIES, plan, policy_of_step
from megatron_balance.mcore import plan_process
from megatron_balance.planner import DataSchedule

_STEPS = itertools.count()


def main() -> None:
    mock.patch.object(plan_process, "build_data_schedule", _plan_in_turn).start()
    mock.patch.object(plan_process, "MIN_SAMPLES", sys.maxsize).start()  # none in a process of its own
    record_steps.main()


def _plan_in_turn(lengths: Any, **keywords: Any) -> DataSchedule:
    options = {name: keywords[name] for name in ("cost_model", "topology", "limits", "home_ranks")}
    return plan(lengths, cp_size=POLICIES[policy_of_step(next(_STEPS))], **options)


if __name__ == "__main__":
    main()
