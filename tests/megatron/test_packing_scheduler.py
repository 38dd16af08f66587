"""The schedule as one of Megatron's own packing schedulers: on a checkout that has them, and the seam by itself.

MEGATRON_CHECKOUT=DIR python -m pytest -m checkout tests/megatron/test_packing_scheduler.py
"""

from __future__ import annotations

import enum
import json
import os
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from megatron_balance import BalanceError
from megatron_balance.mcore import packing_scheduler
from megatron_balance.mcore.packing_scheduler import NAME, PackingScheduler, register
from megatron_balance.mcore.token_alignment import RECIPE_TOKENS

CHECKOUT = os.environ.get("MEGATRON_CHECKOUT")
NUM_RANKS = 2


class Names(enum.Enum):
    DP_BALANCED = "dp_balanced"


class Stock:
    pass


@pytest.fixture
def seam(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """A module with Megatron's map and enumeration, where Megatron's own would be."""
    module = types.ModuleType(packing_scheduler.SEAM)
    module.PackingSchedulerEnum = Names  # type: ignore[attr-defined]
    module.scheduler_map = {Names.DP_BALANCED: Stock}  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, packing_scheduler.SEAM, module)
    monkeypatch.setattr(packing_scheduler.importlib.util, "find_spec", lambda name: name)
    return module


def chosen(module: Any, name: str) -> type:
    """As wrap_data_iterator chooses."""
    return module.scheduler_map[module.PackingSchedulerEnum[name.upper()]]


def test_registered_beside_megatrons_own_and_taken_out_again(seam: Any) -> None:
    registration = register()
    assert registration is not None
    assert chosen(seam, NAME) is PackingScheduler
    assert chosen(seam, "dp_balanced") is Stock
    assert seam.scheduler_map[Names.DP_BALANCED] is Stock  # for those who imported the enumeration before
    registration.undo()
    assert seam.PackingSchedulerEnum is Names
    assert seam.scheduler_map == {Names.DP_BALANCED: Stock}


def test_a_map_of_another_kind_is_refused(seam: Any) -> None:
    seam.scheduler_map = {"dp_balanced": Stock}
    with pytest.raises(BalanceError, match="has no scheduler_map with an entry for each"):
        register()
    assert seam.PackingSchedulerEnum is Names


def test_undo_refuses_when_someone_else_has_added_one_since(seam: Any) -> None:
    registration = register()
    assert registration is not None
    seam.PackingSchedulerEnum = Names
    with pytest.raises(BalanceError, match="was replaced after"):
        registration.undo()


@pytest.mark.skipif(CHECKOUT is not None, reason="the checkout may have one")
def test_a_megatron_without_the_map_is_left_alone() -> None:
    assert register() is None


@pytest.mark.checkout
@pytest.mark.parametrize("prepacked", [True, False], ids=["rows", "samples-with-lengths"])
def test_on_a_checkout(tmp_path: Path, prepacked: bool) -> None:
    """Megatron's wrap_data_iterator and get_batch of a checkout, on two ranks."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(NUM_RANKS)]
    command += [str(Path(__file__).parent / "packing_rank.py"), str(tmp_path), "rows" if prepacked else "samples"]
    paths = [CHECKOUT or "", os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, text=True, capture_output=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    ranks = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(NUM_RANKS)]
    for name in ("dp_balanced", NAME):
        results = [rank[name] for rank in ranks]
        assert len({result["num_microbatches"] for result in results}) == 1
        kept = sorted(sample for result in results for sample in result["samples"])
        assert kept == sorted(sample for rank in ranks for sample in rank["loaded"])  # every sample once, unchanged
        assert all(tokens <= 512 for result in results for tokens in result["tokens"])
    assert all(tokens % RECIPE_TOKENS["mxfp8"] == 0 for rank in ranks for tokens in rank[NAME]["tokens"])
    loads = {name: [sum(rank[name]["tokens"]) for rank in ranks] for name in ("dp_balanced", NAME)}
    assert max(loads[NAME]) < max(loads["dp_balanced"])
    sums = [rank[NAME]["sums"] for rank in ranks]
    lengths = [len(sample) for rank in ranks for sample in rank["loaded"]]
    assert sums == [[sum(lengths), sum(length**2 for length in lengths)]] * NUM_RANKS
