"""Costs: exact, scaled equally on every rank, and never lower for a longer sample."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_balance.cost.model import MAX_TOTAL_COST, CostModel
from megatron_balance.errors import BalanceError
from megatron_balance.model.flops import fwd_flops, fwd_flops_by_part
from megatron_balance.model.presets import PRESETS
from megatron_balance.model.shape import ModelShape

coefficients = st.integers(0, 10**9)
models = st.builds(
    CostModel,
    linear=st.integers(1, 10**9),
    quadratic=coefficients,
    per_sequence=coefficients,
    expert_linear=coefficients,
    windows=st.lists(st.tuples(st.integers(1, 5000), coefficients), max_size=2).map(tuple),
)
lengths = st.lists(st.integers(0, 10**6), min_size=1, max_size=30)


def test_tokens_counts_tokens() -> None:
    model = CostModel.tokens()
    assert [model(length) for length in (0, 1, 7)] == [0, 1, 7]
    scaled = model.sample_costs(np.array([3, 0, 7]))
    assert scaled.costs.tolist() == [3, 0, 7]
    assert scaled.expert_costs.tolist() == [0, 0, 0]
    assert scaled.shift == 0


def test_a_sample_by_hand() -> None:
    model = CostModel(linear=5, quadratic=2, per_sequence=11, expert_linear=3, windows=((4, 7),))
    # 10 tokens in a window of 4 are 1+2+3+4*7 pairs, twice.
    assert model(10) == 5 * 10 + 2 * 100 + 11 + 7 * 2 * 34
    assert model(4) == 5 * 4 + 2 * 16 + 11 + 7 * 16
    assert model.sample_costs(np.array([10])).expert_costs.tolist() == [30]


def test_no_samples_and_no_tokens() -> None:
    model = CostModel(linear=1, per_sequence=4)
    assert model.sample_costs(np.array([], dtype=np.int64)).costs.size == 0
    assert model.sample_costs(np.array([0, 0])).costs.tolist() == [4, 4]


@given(models, st.integers(0, 20000))
def test_a_longer_sample_never_costs_less(model: CostModel, length: int) -> None:
    assert model(length + 1) >= model(length)


@given(models, lengths)
def test_scaled_costs_keep_order_and_sum(model: CostModel, values: list[int]) -> None:
    scaled = model.sample_costs(np.array(values))
    assert int(scaled.costs.sum()) + int(scaled.expert_costs.sum()) < MAX_TOTAL_COST
    order = np.argsort(values, kind="stable")
    assert (np.diff(scaled.costs[order]) >= 0).all()
    assert (np.diff(scaled.expert_costs[order]) >= 0).all()
    for length, cost in zip(values, scaled.costs.tolist(), strict=True):
        assert cost == max(model(length) >> scaled.shift, min(model(length), 1))


@given(models, st.permutations(range(8)))
def test_costs_do_not_depend_on_the_order_of_samples(model: CostModel, order: list[int]) -> None:
    values = np.array([0, 1, 5, 5, 100, 4096, 70000, 10**6])
    assert (model.sample_costs(values[order]).costs == model.sample_costs(values).costs[order]).all()


def test_a_sum_above_the_bound_is_halved_until_it_fits() -> None:
    model = CostModel(linear=2**59)
    few, many = model.sample_costs(np.array([1, 1])), model.sample_costs(np.full(64, 2))
    assert few.shift == 0
    assert many.shift == 6
    assert many.costs.tolist() == [2**54] * 64
    # One token beside sixteen huge samples still costs something.
    lopsided = CostModel(quadratic=1).sample_costs(np.array([1] + [2**31] * 16))
    assert lopsided.shift > 0
    assert lopsided.costs[0] == 1
    assert int(lopsided.costs.sum()) < MAX_TOTAL_COST


def test_the_cost_of_a_huge_batch_is_exact_before_scaling() -> None:
    shape = ModelShape.preset("DeepSeek-V3")
    model = CostModel.from_shape(shape)
    assert model(2**20) > 2**60
    values = np.full(4096, 2**20)
    scaled = model.sample_costs(values)
    assert scaled.costs[0] == model(2**20) >> scaled.shift
    assert scaled.shift > 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"linear": -1}, "linear is -1"),
        ({"quadratic": 0.5}, "quadratic is 0.5"),
        ({"per_microbatch": True}, "per_microbatch is True"),
        ({"windows": ((0, 1),)}, "window of 0 tokens"),
        ({"windows": ((4, -1),)}, r"windows\[4\] is -1"),
        ({}, "no coefficient above zero"),
    ],
)
def test_coefficients_that_cannot_be_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(BalanceError, match=message):
        CostModel(**change)


# Training FLOPs ------------------------------------------------------------------------------------------------------


def test_training_is_three_gemms_and_three_and_a_half_cores() -> None:
    shape = ModelShape.preset("Qwen3-8B")
    flops = fwd_flops(shape)
    model = CostModel.from_shape(shape)
    assert (model.linear, 2 * model.quadratic) == (3 * flops.linear, 7 * flops.quadratic)
    assert (model.expert_linear, model.windows, model.per_sequence, model.per_microbatch) == (0, (), 0, 0)


def test_recompute_adds_a_forward_pass_of_all_but_the_output_layer() -> None:
    shape = ModelShape.preset("Qwen3-8B")
    head = fwd_flops_by_part(shape)["lm_head"].linear
    plain, recomputed = CostModel.from_shape(shape), CostModel.from_shape(shape, recompute=True)
    assert recomputed.linear - plain.linear == fwd_flops(shape).linear - head
    assert recomputed.quadratic - plain.quadratic == fwd_flops(shape).quadratic


def test_experts_are_kept_apart_only_where_a_group_shares_them() -> None:
    shape = ModelShape.preset("Qwen3-30B-A3B")
    alone, shared = CostModel.from_shape(shape), CostModel.from_shape(shape, ep_size=8)
    assert alone.expert_linear == 0
    assert shared.expert_linear == 3 * fwd_flops(shape).expert_linear > 0
    assert alone.linear == shared.linear + shared.expert_linear
    assert alone.quadratic == shared.quadratic


def test_windows_are_scaled_as_the_core_is() -> None:
    shape = ModelShape.preset("gpt-oss-20b")
    assert CostModel.from_shape(shape).windows == tuple((w, c * 7 // 2) for w, c in fwd_flops(shape).windows)


def test_an_odd_core_is_rounded_up() -> None:
    shape = ModelShape(
        hidden_size=1,
        num_layers=1,
        num_attention_heads=1,
        num_query_groups=1,
        kv_channels=1,
        ffn_hidden_size=1,
        padded_vocab_size=1,
        gated_linear_unit=False,
        multi_latent_attention=True,
        kv_lora_rank=1,
        qk_head_dim=1,
        qk_pos_emb_head_dim=1,
        v_head_dim=1,
    )
    assert fwd_flops(shape).quadratic == 3
    assert CostModel.from_shape(shape).quadratic == 11


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("ep_size", [1, 8])
def test_every_preset_has_a_cost(name: str, ep_size: int) -> None:
    model = CostModel.from_shape(ModelShape.preset(name), ep_size=ep_size)
    scaled = model.sample_costs(np.array([1, 512, 65536]))
    assert (np.diff(scaled.costs) > 0).all()
    assert (scaled.expert_costs.sum() > 0) == (ep_size > 1 and model.expert_linear > 0)


def test_a_micro_batch_costs_as_many_tokens_as_said() -> None:
    shape = ModelShape.preset("Qwen3-30B-A3B")
    alone, shared = (CostModel.from_shape(shape, ep_size=ep_size, microbatch_tokens=128) for ep_size in (1, 8))
    assert alone.per_microbatch == 128 * alone.linear == shared.per_microbatch
    assert CostModel.from_shape(shape).per_microbatch == 0
