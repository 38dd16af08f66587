"""Megatron-Bridge's own `pretrain` trains and evaluates balanced as it does stock.

scripts/check adapters bridge
"""

import json

import pytest
from forked import call
from training_run import ALLOWANCES, Recorded, RunFailed, assert_equal, read_records

NUM_STEPS = 4
NUM_PACKS = 12
BALANCED = {"max_tokens_per_gpu": 256}


def run(folder, *, num_ranks=2, **settings):
    call(
        "bridge_run:train_here",
        str(folder),
        [],
        num_ranks=num_ranks,
        timeout_seconds=300,
        module="bridge_run",
        environment={"BRIDGE": json.dumps(settings)},
    )
    return Recorded(read_records(folder, num_ranks=num_ranks), (folder / "rank0.log").read_text(errors="replace"))


@pytest.mark.parametrize(
    ("settings", "num_ranks"),
    [
        pytest.param({}, 2, id="DP2"),
        pytest.param({"loader": "cyclic"}, 2, id="DP2-cyclic"),
        pytest.param({"model": {"tensor_model_parallel_size": 2, "sequence_parallel": True}}, 4, id="TP2-SP-DP2"),
        pytest.param({"model": {"pipeline_model_parallel_size": 2}}, 4, id="PP2-DP2"),
        pytest.param({"model": {"context_parallel_size": 2}}, 4, id="CP2-DP2"),
    ],
)
def test_trains_and_evaluates_as_stock(tmp_path, settings, num_ranks):
    stock = run(tmp_path / "stock", num_ranks=num_ranks, **settings)
    install = BALANCED | {"flags": ["--balance-verify"]}
    balanced = run(tmp_path / "balanced", num_ranks=num_ranks, install=install, **settings)
    assert len(balanced.steps) == NUM_STEPS
    assert_equal(balanced, reference=stock)
    ours, reference = balanced.steps[0], stock.steps[0]
    assert len(reference["evaluations"]) == 3  # after steps 2 and 4, and at the end
    allowed = ALLOWANCES["fp32"].loss
    for one, other in zip(ours["evaluations"], reference["evaluations"], strict=True):
        assert one == pytest.approx(other, rel=allowed)
    assert (ours["balanced_evaluations"], reference["balanced_evaluations"]) == (3, 0)
    assert ours["restored"]
    for step in balanced.steps:
        samples = [sample for slots in step["ranks"] for slot in slots for sample in slot]
        assert sorted(samples) == list(range(len(step["lengths"])))
        assert len(samples) > NUM_PACKS  # sequences, not packs
        assert max(step["imbalance"]) < 1.1 * sum(step["imbalance"]) / len(step["imbalance"])
    assert "megatron_balance: iteration 4 |" in balanced.output
    assert "--balance-verify: the first step equals stock" in balanced.output


def test_means_of_micro_batches_are_weighed_as_stock(tmp_path):
    """The gradients of Bridge without `calculate_per_token_loss`; tokens that count alike give others."""
    stock = run(tmp_path / "stock", model={"calculate_per_token_loss": False})
    flags = ["--balance-loss-weighting", "micro-batch"]
    weighed, unweighed = (
        run(tmp_path / name, install=BALANCED | {"flags": flags})
        for name, flags in (("weighed", flags), ("unweighed", []))
    )
    assert_equal(weighed, reference=stock)
    with pytest.raises(AssertionError):
        assert_equal(unweighed, reference=stock)


def test_a_mean_of_means_is_refused(tmp_path):
    with pytest.raises(RunFailed, match="--calculate-per-token-loss is not set"):
        run(tmp_path, num_ranks=1, install=BALANCED, model={"calculate_per_token_loss": False})
