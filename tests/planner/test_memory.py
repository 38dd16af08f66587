"""Memory: pipelines, recomputation, budgets, buckets; and that no plan under a derived cap exceeds its budget."""

from __future__ import annotations

import argparse

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from megatron_balance.cost.model import CostModel
from megatron_balance.errors import BalanceError
from megatron_balance.mcore.setup.flags import token_cap
from megatron_balance.memory.budget import budget_of_device, derive_cap
from megatron_balance.memory.model import GIB, TrainingMemory, chunks_under_way, memory_model
from megatron_balance.memory.precision import Precision
from megatron_balance.memory.shape_buckets import bucketed_limits, filled_tokens
from megatron_balance.model.presets import PRESETS
from megatron_balance.model.shape import ModelShape
from megatron_balance.planner.build import build_data_schedule
from megatron_balance.planner.partition import ALGORITHMS
from megatron_balance.topology import Limits, Topology

QWEN = ModelShape.preset("Qwen3-8B")


def bytes_per_token(shape: ModelShape = QWEN, topology: Topology | None = None, **training: object) -> int:
    model = memory_model(shape, topology=topology or Topology(1), training=TrainingMemory(**training))  # type: ignore
    return model.stages[0].bytes_per_token


def test_the_first_stage_of_a_pipeline_holds_as_many_micro_batches_as_there_are_stages() -> None:
    topology = Topology(1, pp_size=4)
    assert [chunks_under_way(stage, topology=topology) for stage in range(4)] == [4, 3, 2, 1]


def test_interleaving_holds_what_korthikanti_says() -> None:
    """1 + (pp-1)/(pp vpp) of the layers' micro-batches on the first stage."""
    topology = Topology(1, pp_size=4, vpp_size=2, microbatch_multiple=4)
    assert chunks_under_way(0, topology=topology) / (4 * 2) == 1 + 3 / (4 * 2)


def test_logits_are_fp32_on_the_last_stage_and_shared_by_tensor_parallel_ranks() -> None:
    model = memory_model(QWEN, topology=Topology(1, tp_size=2, pp_size=2))
    vocabulary = QWEN.padded_vocab_size
    assert [stage.logits_bytes_per_token for stage in model.stages] == [0, vocabulary // 2 * (4 + 2)]
    fp32 = TrainingMemory(precision=Precision.fp32())
    assert memory_model(QWEN, topology=Topology(1), training=fp32).logits_bytes_per_token == vocabulary * 4


def test_what_shares_or_recomputes_takes_less() -> None:
    whole = bytes_per_token()
    assert bytes_per_token(topology=Topology(1, tp_size=2)) < whole
    split = Topology(1, tp_size=2, sequence_parallel=True)
    assert bytes_per_token(topology=split) < bytes_per_token(topology=Topology(1, tp_size=2))
    assert bytes_per_token(topology=split) == pytest.approx(whole / 2, rel=1e-3)
    by_modules = bytes_per_token(recompute_granularity="selective", recompute_modules=frozenset({"mlp"}))
    assert bytes_per_token(recompute_granularity="full") < by_modules < whole
    block = {"recompute_granularity": "full", "recompute_method": "block"}
    assert bytes_per_token(**block, recompute_num_layers=36) < bytes_per_token(**block, recompute_num_layers=18) < whole
    assert bytes_per_token(precision=Precision(fused=False)) > whole


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_has_a_model(name: str) -> None:
    shape = ModelShape.preset(name)
    topology = Topology(2, tp_size=2, pp_size=2, ep_size=2 if shape.num_experts else 1, sequence_parallel=True)
    model = memory_model(shape, topology=topology, training=TrainingMemory(distributed_optimizer=True))
    assert len(model.stages) == 2
    # Weights in bf16 and gradients in fp32 at least, of half the model on two ranks; the largest preset has 700 G.
    assert 10**9 / 4 < model.static_bytes < 6 * 700e9
    assert model.stages[0].bytes_per_token > 2 * shape.hidden_size * shape.num_layers / 2


def test_an_uneven_share_of_tokens_costs_experts_memory() -> None:
    shape = ModelShape.preset("Qwen3-30B-A3B")
    even, uneven = (
        bytes_per_token(shape, Topology(8, ep_size=8), expert_imbalance=imbalance) for imbalance in (1.0, 2.0)
    )
    assert uneven > even
    assert bytes_per_token(shape, Topology(8), expert_imbalance=2.0) == bytes_per_token(shape, Topology(8))


def test_a_tenth_of_a_device_is_kept_back_and_two_gib_at_least() -> None:
    assert budget_of_device(80 * GIB) == 72 * GIB
    assert budget_of_device(10 * GIB) == 8 * GIB
    assert budget_of_device(0) == 0


def test_a_budget_that_weights_alone_exceed_is_refused() -> None:
    with pytest.raises(BalanceError, match=r"not even 128 tokens fit: of a budget of 72.00 GiB .* take 137"):
        derive_cap(memory_model(QWEN, topology=Topology(1)), budget_bytes=72 * GIB, topology=Topology(1))


def test_in_a_pipeline_the_cap_is_held_at_the_longest_sample() -> None:
    topology = Topology(8, tp_size=4, pp_size=2, sequence_parallel=True)
    model = memory_model(QWEN, topology=topology, training=TrainingMemory(distributed_optimizer=True))
    free = derive_cap(model, budget_bytes=72 * GIB, topology=topology)
    held = derive_cap(model, budget_bytes=72 * GIB, topology=topology, seq_length=4000)
    assert (held.tokens, free.tokens > 4096) == (4096, True)
    assert "lengthen the pipeline's bubble" in str(held)


@pytest.mark.parametrize("text", ["many", "1.5", ""])
def test_a_cap_is_a_number_or_auto(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="neither a number of tokens nor 'auto'"):
        token_cap(text)


@given(
    lengths=st.lists(st.integers(1, 40000), min_size=1, max_size=60),
    parallel=st.sampled_from([(1, 1, 1), (2, 1, 1), (4, 2, 1), (2, 1, 2), (2, 2, 2)]),
    gib=st.floats(20, 140),
    bucket=st.sampled_from([1, 96, 128, 1000]),
    recompute=st.sampled_from([None, "selective", "full"]),
    algorithm=st.sampled_from(["auto", *ALGORITHMS]),
)
def test_no_micro_batch_of_several_samples_exceeds_the_budget(
    lengths: list[int],
    parallel: tuple[int, int, int],
    gib: float,
    bucket: int,
    recompute: str | None,
    algorithm: str,
) -> None:
    tp_size, cp_size, pp_size = parallel
    topology = Topology(4, tp_size=tp_size, cp_size=cp_size, pp_size=pp_size, sequence_parallel=tp_size > 1)
    training = TrainingMemory(recompute_granularity=recompute, distributed_optimizer=True)
    model = memory_model(QWEN, topology=topology, training=training)
    budget = int(gib * GIB)
    try:
        cap = derive_cap(model, budget_bytes=budget, topology=topology, shape_bucket=bucket)
    except BalanceError:
        assume(False)
        return
    assert model.peak_bytes(cap.tokens) <= budget
    limits = bucketed_limits(Limits(cap.tokens), topology=topology, shape_bucket=bucket, flag="--shape-bucket")
    schedule = build_data_schedule(
        lengths, cost_model=CostModel.tokens(), topology=topology, limits=limits, algorithm=algorithm
    )
    tokens = np.zeros(4 * schedule.num_microbatches, dtype=np.int64)
    np.add.at(tokens, schedule.slot_of, schedule.padded_lengths)
    filled = filled_tokens(tokens, topology=topology, limits=limits, shape_bucket=bucket)
    for num_tokens in filled[schedule.slot_counts() > 1]:
        assert num_tokens % cp_size == 0
        assert model.peak_bytes(int(num_tokens) // cp_size) <= budget


def test_a_bucket_above_the_cap_is_refused_and_over_long_samples_are_not_filled() -> None:
    topology = Topology(2, cp_size=2)
    limits = bucketed_limits(Limits(1000), topology=topology, shape_bucket=300, flag="--shape-bucket")
    assert limits == Limits(900)
    filled = filled_tokens(np.array([4, 600, 1800, 1804]), topology=topology, limits=limits, shape_bucket=300)
    assert filled.tolist() == [600, 600, 1800, 1804]
    with pytest.raises(BalanceError, match="--shape-bucket is 3000"):
        bucketed_limits(Limits(1000), topology=topology, shape_bucket=3000, flag="--shape-bucket")


def test_alignment_holds_for_over_long_samples_and_dummies_too() -> None:
    topology = Topology(2, cp_size=2, tp_size=2, sequence_parallel=True, token_alignment=32)
    limits = bucketed_limits(Limits(1000), topology=topology, shape_bucket=300, flag="--shape-bucket")
    assert limits == Limits(960)  # a bucket of 320: 300 tokens, raised to shares of 32 on two sequence-parallel ranks
    filled = filled_tokens(np.array([0, 8, 1288, 1920, 1928]), topology=topology, limits=limits, shape_bucket=300)
    assert filled.tolist() == [128, 640, 1920, 1920, 2048]
    with pytest.raises(BalanceError, match=r"multiples of 64 tokens .*alignment is 32 .*--max-tokens-per-gpu 60 holds"):
        bucketed_limits(Limits(60), topology=topology, shape_bucket=1, flag="--shape-bucket")
