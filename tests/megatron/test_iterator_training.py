"""Loops with iterators of their own train as Megatron's own loop does: the same items, bit for bit the same losses."""

from __future__ import annotations

from pathlib import Path

import pytest
from forked_runs import train
from iterator_loops import STEPS_OF_ITERATOR, WRAPPED_ANEW
from training_run import Recorded, RunFailed

NUM_STEPS = 6
FLAGS = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --num-query-groups 2 --ffn-hidden-size 64 "
    "--seq-length 256 --max-position-embeddings 256 --global-batch-size 8 "
    f"--train-iters {NUM_STEPS} --use-dynamic-batch-size --max-tokens-per-gpu 512 --balance-data --balance-by-flops"
)
LAYOUTS = {
    "DP2": ("", 2),
    "PP2": ("--pipeline-model-parallel-size 2", 4),
    "TP2": ("--tensor-model-parallel-size 2", 2),
    "PP2-VPP2": (
        "--num-layers 4 --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1",
        2,
    ),
}
EVERY_LOOP = [*STEPS_OF_ITERATOR, WRAPPED_ANEW]


def run(folder: Path, layout: str, *, loop: str | None = None, flags: str = "") -> Recorded:
    parallel, num_ranks = LAYOUTS[layout]
    words = f"{FLAGS} {parallel} {flags}".split()
    if loop is None:
        return train(folder, words, num_ranks=num_ranks)
    return train(folder, words, num_ranks=num_ranks, module="iterator_loops", environment={"LOOP": loop})


@pytest.mark.parametrize(
    ("layout", "loops"),
    [
        pytest.param("DP2", EVERY_LOOP[:1], id="DP2-new"),
        pytest.param("DP2", EVERY_LOOP[1:], marks=pytest.mark.slow, id="DP2"),
        pytest.param("PP2", EVERY_LOOP[:2], marks=pytest.mark.slow, id="PP2"),
        pytest.param("TP2", EVERY_LOOP[:2], marks=pytest.mark.slow, id="TP2"),
        pytest.param("PP2-VPP2", EVERY_LOOP[:1], marks=pytest.mark.slow, id="PP2-VPP2"),
    ],
)
def test_each_loop_trains_on_the_same_items(tmp_path: Path, layout: str, loops: list[str]) -> None:
    reference = run(tmp_path / "one", layout)
    assert len(reference.steps) == NUM_STEPS
    for loop in loops:
        ours = run(tmp_path / loop.replace(" ", "-"), layout, loop=loop)
        for key in ("lm_loss", "grad_norm", "microbatch_tokens"):
            assert [step[key] for step in ours.steps] == [step[key] for step in reference.steps]
        assert "another iterator came" not in ours.output


def test_look_ahead_is_refused_where_iterators_end_with_their_step(tmp_path: Path) -> None:
    with pytest.raises(RunFailed, match=r"ended after 4 of 8 items of this step\. --balance-lookahead 2 takes later"):
        run(tmp_path, "DP2", loop="a new iterator each step", flags="--balance-lookahead 2")
