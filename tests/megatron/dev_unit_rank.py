"""One rank of test_dynamic_packing_scheduler: dev's own unit tests of its executor, with our scheduler in the map.

torchrun --nproc-per-node 8 … dev_unit_rank.py OUT_DIR CHECKOUT
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from megatron_balance import CostModel
from megatron_balance.devkit.cpu import enable_cpu

TESTS = "test_wrap_dataloader and default_dynamic_cp"


class Outcomes:
    """The names of tests that passed and failed."""

    def __init__(self) -> None:
        self.passed: list[str] = []
        self.failed: list[str] = []

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            self.failed.append(report.nodeid)
        elif report.when == "call" and report.passed:
            self.passed.append(report.nodeid)


def main() -> None:
    """Run them."""
    out, checkout = Path(sys.argv[1]), Path(sys.argv[2])
    enable_cpu()
    dist.init_process_group("gloo")  # else its tests make one of NCCL
    from megatron_balance.mcore import dynamic_packing_scheduler

    num_plans = 0
    stock = dynamic_packing_scheduler.plan_rank_lists

    def counted(*positional: Any, **keywords: Any) -> Any:
        nonlocal num_plans
        num_plans += 1
        return stock(*positional, **keywords)

    dynamic_packing_scheduler.plan_rank_lists = counted
    dynamic_packing_scheduler._cost_model = lambda: CostModel(linear=1000, quadratic=1)
    replacement = dynamic_packing_scheduler.replace_dynamic_scheduler()
    assert replacement is not None, "this checkout has no scheduler of dynamic context parallelism"
    outcomes = Outcomes()
    os.chdir(checkout)
    sys.path.insert(0, str(checkout))
    # Its conftest.py downloads what these tests do not read.
    options = ["-q", "-p", "no:cacheprovider", "--noconftest", "-k", TESTS]
    status = pytest.main([*options, "tests/unit_tests/test_sequence_packing.py"], plugins=[outcomes])
    replacement.undo()
    result = {"passed": sorted(outcomes.passed), "failed": outcomes.failed, "num_plans": num_plans}
    (out / f"{os.environ['RANK']}.json").write_text(json.dumps(result))
    sys.exit(int(status))


if __name__ == "__main__":
    main()
