"""All ranks call the same collectives, in one order, with the same shapes: torch compares them while they train.

`TORCH_DISTRIBUTED_DEBUG=DETAIL` compares the operation, shape and dtype within a process group, over gloo too. Not
messages between two ranks, as this package exchanges samples, the split sizes of all_to_all_single, nor the root of a
broadcast.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from forked_runs import train
from test_equality import BY_FLOPS, FLAGS, LAYERS, MODEL_PARALLEL
from training_run import RunFailed

NUM_STEPS = 2
STRICT = {"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}


@pytest.mark.slow
@pytest.mark.parametrize(("parallel", "num_ranks"), [pytest.param(LAYERS, 2, id="DP2"), *MODEL_PARALLEL])
def test_all_ranks_call_the_same(tmp_path: Path, parallel: str, num_ranks: int) -> None:
    flags = f"{FLAGS} {parallel} {BY_FLOPS} --train-iters {NUM_STEPS}"
    ran = train(tmp_path, flags.split(), num_ranks=num_ranks, environment=STRICT)
    assert [step["num_microbatches"] > 0 for step in ran.steps] == [True] * NUM_STEPS
    assert any("ranks" in steps[0] for steps in ran.ranks), "balanced"


def test_a_rank_with_another_shape_is_found(tmp_path: Path) -> None:
    with pytest.raises(RunFailed, match="Detected mismatch between collectives on ranks"):
        train(tmp_path, [], num_ranks=2, module="unequal_shapes", environment=STRICT)
