"""Costs: exact, scaled equally on every rank, never lower for a longer sample; from FLOPs, seconds and links."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_balance import BalanceError, CostModel, ModelShape, calculate_fwd_flops
from megatron_balance.cost.calibration import Calibration, fit_seconds
from megatron_balance.cost.model import MAX_TOTAL_COST, StageCosts
from megatron_balance.cost.rates import ATTENTION_RATES, exchange_costs, resolve_cost
from megatron_balance.model.layout import PipelineLayout

coefficients = st.integers(0, 10**9)
models = st.builds(
    CostModel,
    linear=st.integers(1, 10**9),
    quadratic=coefficients,
    cp_received=coefficients,
    expert_linear=coefficients,
    windows=st.lists(st.tuples(st.integers(1, 5000), coefficients), max_size=2).map(tuple),
)
lengths = st.lists(st.integers(0, 10**6), min_size=1, max_size=30)


def test_a_sample_by_hand():
    model = CostModel(linear=5, quadratic=2, expert_linear=3, windows=((4, 7),))
    # 10 tokens in a window of 4 are 1+2+3+4*7 pairs, twice.
    assert model(10) == (5 + 3) * 10 + 2 * 100 + 7 * 2 * 34
    assert model(4) == (5 + 3) * 4 + 2 * 16 + 7 * 16
    assert model.sample_costs(np.array([10])).expert_costs.tolist() == [[30]]
    assert model.local_cost(10) == model(10) - 30
    assert CostModel(quadratic=2**24)(2**20) == 2**64  # beyond int64


@given(models, lengths)
def test_scaled_costs_keep_order_and_sum(model, values):
    scaled = model.sample_costs(np.array(values))
    local, expert = scaled.costs[0], scaled.expert_costs[0]
    assert int(local.sum()) + int(expert.sum()) < MAX_TOTAL_COST
    order = np.argsort(values, kind="stable")
    assert (np.diff(local[order]) >= 0).all()
    assert (np.diff(expert[order]) >= 0).all()
    for length, cost in zip(values, local.tolist(), strict=True):
        assert cost == -(-model.local_cost(length) >> scaled.shift)


def test_a_sum_above_the_bound_is_halved_until_it_fits():
    model = CostModel(linear=2**58)
    few, many = model.sample_costs(np.array([1, 1])), model.sample_costs(np.full(64, 2))
    assert few.shift == 0
    assert many.shift == 6
    assert many.costs.tolist() == [[2**53] * 64]
    # One token beside sixteen huge samples still costs something.
    lopsided = CostModel(quadratic=1).sample_costs(np.array([1] + [2**31] * 16))
    assert lopsided.shift > 0
    assert lopsided.costs[0, 0] == 1
    assert int(lopsided.costs.sum()) < MAX_TOTAL_COST


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"linear": -1}, "linear is -1"),
        ({"quadratic": 0.5}, "quadratic is 0.5"),
        ({"per_microbatch": True}, "per_microbatch is True"),
        ({"windows": ((4, -1),)}, r"windows\[4\] is -1"),
        ({"windows": ((0, 1),)}, r"a window of CostModel.windows is 0"),
        ({"windows": ((4, 0),)}, "no coefficient above zero"),
        ({}, "no coefficient above zero"),
    ],
)
def test_coefficients_that_cannot_be_are_refused(change, message):
    with pytest.raises(BalanceError, match=message):
        CostModel(**change)


def test_each_rank_of_a_context_parallel_group_receives_from_the_others():
    model = CostModel(linear=100, quadratic=3, per_microbatch=50, cp_exchange=8)
    for size in (1, 2, 4):
        shared = model.summed_over_cp(size)
        # On 10 tokens attention takes 300 and hides what four ranks receive; on one token it hides nothing.
        assert shared(1) == 100 + max(3, 8 * (size - 1))
        assert shared(10) == model(10) == 100 * 10 + 300
        assert (shared.per_microbatch, shared.cp_exchange) == (50 * size, 0)


# Training FLOPs ------------------------------------------------------------------------------------------------------

GATED = {"num_attention_heads": 4, "num_query_groups": 2, "kv_channels": 3, "gated_linear_unit": True}
DENSE = ModelShape(hidden_size=8, num_layers=2, ffn_hidden_size=16, padded_vocab_size=10, **GATED)
MOE = replace(DENSE, num_experts=6, moe_router_topk=2, moe_ffn_hidden_size=12)
HEAD = 2 * 8 * 10
GEMMS = 2 * (2 * 8 * 12 + 2 * 2 * 8 * 6 + 2 * 12 * 8 + 3 * 2 * 8 * 16) + HEAD
CORE = 2 * 4 * (2 * 3 + 2 * 3) // 2
"""Two layers: of a token, and of a squared token, half of which is masked."""


def test_the_reference_by_hand_is_the_forward_pass():
    assert calculate_fwd_flops([7], DENSE) == GEMMS * 7 + CORE * 7**2


def test_training_is_three_gemms_and_three_and_a_half_cores():
    launches = 128 * 3 * GEMMS  # a micro-batch costs 128 tokens beside its samples
    assert CostModel.from_shape(DENSE) == CostModel(linear=3 * GEMMS, quadratic=7 * CORE // 2, per_microbatch=launches)


def test_experts_are_kept_apart_only_where_a_group_shares_them():
    alone, shared = CostModel.from_shape(MOE), CostModel.from_shape(MOE, ep_size=8)
    assert alone.expert_linear == 0
    assert shared.expert_linear == 3 * 2 * 2 * 3 * 2 * 8 * 12
    assert alone.linear == shared.linear + shared.expert_linear
    assert alone.quadratic == shared.quadratic
    assert alone.per_microbatch == 128 * alone.linear == shared.per_microbatch


# Stages of a pipeline ------------------------------------------------------------------------------------------------


def test_the_kinds_of_chunks_of_a_pipeline_add_up_to_the_model():
    windows = {"window_size": (15, 0), "window_attn_skip_freq": (1, 1, 0, 1, 1, 0)}
    shape = replace(MOE, num_layers=6, mtp_num_layers=1, moe_layer_freq=(0, 0, 1, 1, 1, 1), **windows)
    layout = PipelineLayout(2, (2, 1, 2, 1))  # two stages of two chunks: layers 0 1 | 2 | 3 4 | 5, MTP, output layers
    for ep_size in (1, 8):
        whole = CostModel.from_shape(shape, ep_size=ep_size)
        model = CostModel.from_shape(shape, ep_size=ep_size, layout=layout)
        assert replace(model, stages=None) == whole
        assert model.stages is not None
        table, kinds = model.stages.kinds, model.stages.kinds_of(model)
        assert table == ((0, 2), (1, 3))
        for name in ("linear", "expert_linear", "quadratic"):
            total = sum(getattr(kinds[kind], name) for stage in table for kind in stage)
            assert abs(total - 4 * 1024 * getattr(whole, name)) <= 2  # a kind is rounded by half a unit
        # Layers and ends: the embedding; one output layer more, and the layer, of MTP.
        launches = [kind.per_microbatch / whole.per_microbatch / 4096 for kind in kinds]
        assert launches == pytest.approx([(2 + 1) / 10, 1 / 10, 2 / 10, (1 + 3) / 10], rel=1e-6)
        assert [kind.expert_linear > 0 for kind in kinds] == [ep_size > 1 and has for has in (False, True, True, True)]
        assert kinds[0].quadratic == kinds[2].quadratic == 0  # windows alone
        head = (kinds[3].linear - 2 * kinds[1].linear) // 4096  # the last layer, that of MTP and both output layers
        assert head == 3 * (2 * HEAD + 2 * 2 * 8 * 8)


def test_costs_by_kind_are_scaled_together():
    stages = StageCosts(((0,), (1,)), (CostModel(linear=1), CostModel(linear=3, quadratic=4)))
    tokens = replace(CostModel.tokens(), stages=stages).sample_costs(np.array([1, 10]))
    assert (tokens.costs.tolist(), tokens.shift) == ([[512, 5120], [1536, 15360]], -10)
    huge = CostModel(linear=2**59, per_microbatch=2**60, stages=stages).sample_costs(np.full(64, 2))
    assert huge.costs[1].tolist() == [3 * 2**59 * 2 >> 1 + huge.shift] * 64
    assert huge.costs.sum(axis=1).max() < MAX_TOTAL_COST
    assert huge.per_microbatch.tolist() == [2**60 >> huge.shift] * 2  # no chunk says how its launches differ
    assert (
        CostModel.from_dict(json.loads(json.dumps(asdict(replace(CALIBRATION.costs, stages=stages))))).stages == stages
    )
    # What fit measures on the first stage, times two: half of the mean of linear, no attention.
    first = stages.whole_from_first(CostModel(linear=50, quadratic=9))
    assert (first.linear, first.quadratic) == (100, 9)
    for kinds in (((0,), (1, 1)), ((0, 0),), ((0, 1, 2),)):
        with pytest.raises(BalanceError, match=r"StageCosts\.kinds"):
            StageCosts(kinds, stages.costs)


# Rates ---------------------------------------------------------------------------------------------------------------


def test_a_cost_over_its_rate_is_seconds():
    shape, linear, attention = ModelShape.preset("Qwen3-8B"), 700, 300
    flops = CostModel.from_shape(shape)
    timed = CostModel.from_shape(shape, linear_tflops=linear, attention_tflops=attention)
    for length in (100, 10_000, 1_000_000):
        seconds = flops.linear * length / (linear * 1e12) + flops.quadratic * length**2 / (attention * 1e12)
        assert timed(length) / (linear * 1e12) == pytest.approx(seconds, rel=1e-6)


@pytest.mark.parametrize(
    ("name", "value"), [("linear_tflops", 0), ("attention_tflops", -1), ("attention_tflops", float("nan"))]
)
def test_a_rate_that_cannot_be_is_named(name, value):
    with pytest.raises(BalanceError, match=name):
        CostModel.from_shape(DENSE, **{name: value})


@pytest.mark.parametrize(("models", "precision"), ATTENTION_RATES)
def test_the_default_rate_lies_among_those_published(models, precision):
    profiles = json.loads((Path(__file__).parents[2] / "benchmarks" / "profiles.json").read_text())
    published = [
        profile["attention_tflops"] / profile["linear_tflops"]
        for profile in profiles.values()
        if (profile["models"], profile["precision"]) == (models, precision)
    ]
    assert 0.9 * min(published) <= ATTENTION_RATES[models, precision] <= 1.1 * max(published)


# Seconds of a file ---------------------------------------------------------------------------------------------------

TRUTH = np.array([3e-4, 2e-5, 1e-6, 4e-10])
CALIBRATION = Calibration(
    costs=CostModel(
        per_microbatch=3 * 10**14,
        linear=10**12,
        expert_linear=5 * 10**11,
        quadratic=4 * 10**8,
        windows=((128, 2 * 10**9),),
        cp_exchange=10**11,
    ),
    held_out_error=0.02,
    origin={"device": "a test"},
)


def microbatches(*, num, seed):
    """Features `[num, 4]` of micro-batches of lognormal lengths: one, sequences, tokens, squared tokens."""
    rng = np.random.default_rng(seed)
    rows = []
    for _ in range(num):
        lengths = np.clip(rng.lognormal(6, 1.2, rng.integers(1, 20)), 1, 8192).round()
        rows.append([1.0, lengths.size, lengths.sum(), (lengths**2).sum()])
    return np.array(rows)


def test_measurements_that_something_disturbed_hardly_move_the_fit():
    features = microbatches(num=200, seed=1)
    rng = np.random.default_rng(2)
    seconds = features @ TRUTH * rng.normal(1, 0.01, 200)
    seconds[::10] *= rng.uniform(2, 6, 20)  # every tenth ran while something else did
    fresh = microbatches(num=100, seed=3)
    fitted = fresh @ fit_seconds(features, seconds=seconds)
    assert np.median(np.abs(fitted / (fresh @ TRUTH) - 1)) < 0.005


def test_a_file_reads_back_what_was_written_and_names_a_cost(tmp_path):
    path = tmp_path / "seconds.json"
    CALIBRATION.write(path)
    assert Calibration.read(path) == CALIBRATION
    assert resolve_cost(str(path), ep_size=2) == CALIBRATION.cost_model(ep_size=2)
    assert resolve_cost() == CostModel.tokens()


def test_parallel_ranks_share_tokens_but_not_launches():
    whole, shared = CALIBRATION.cost_model(), CALIBRATION.cost_model(ep_size=8).of_rank(tp_size=4)
    assert shared.linear * 4 == pytest.approx(1e12, abs=4)
    assert shared.expert_linear * 4 == pytest.approx(5e11, abs=4)
    assert whole.linear == shared.linear * 4 + shared.expert_linear * 4
    assert shared.cp_exchange * 4 == whole.cp_exchange == 1e11
    assert shared.per_microbatch == whole.per_microbatch


# Costs by name, and of communication ---------------------------------------------------------------------------------


def test_a_cost_by_name_is_that_of_a_model():
    shape = ModelShape.preset("Qwen3-8B")
    assert resolve_cost(model="qwen3-8b") == CostModel.from_shape(shape)
    assert resolve_cost("tokens", model=shape) == CostModel.tokens()
    for cost, model, message in (("flops", None, "--model"), ("fast", None, "'fast'"), (None, "GPT-9", "'GPT-9'")):
        with pytest.raises(BalanceError, match=message):
            resolve_cost(cost, model=model)


def received(shape, **sizes):
    """Bytes of a token: a byte a second, a FLOP a second. Of the ring, all-to-alls and all-gathers."""
    return list(exchange_costs(shape, bytes_per_second=1, tflops=1e-12, **sizes).values())


def test_layers_exchange_what_their_context_parallelism_needs():
    assert received(ModelShape.preset("Qwen3-8B")) == [3 * 36 * 2 * 8 * 128 * 2, 0, 0]  # 8 groups of 128
    latent = ModelShape.preset("DeepSeek-V3")  # uncompressed heads
    assert received(latent) == [3 * len(latent.layers()) * 128 * (128 + 64 + 128) * 2, 0, 0]
    nets = ModelShape.preset("Qwen3-Next-80B-A3B")  # 12 layers attend, 2 groups of 256; 36 have 16 and 32 heads of 128
    ring = 3 * 12 * 2 * 2 * 256
    assert received(nets) == [ring * 2, 2 * 36 * (2 * 16 * 128 + 3 * 32 * 128 + 2 * 32) * 2, 0]
    hybrid = ModelShape.preset("Nemotron-3-Nano-30B-A3B")  # 6 layers attend; 23 have 64 heads of 64, 8 groups of 128
    assert received(hybrid) == [3 * 6 * 2 * 2 * 128 * 2, 23 * 2 * (3 * 64 * 64 + 2 * 8 * 128 + 64) * 2, 0]
    sparse = ModelShape.preset("DeepSeek-V3.2")
    per_layer = 2 * (512 + 64) + 128
    assert received(sparse) == [0, 0, len(sparse.layers()) * per_layer * 2]
    assert received(sparse, tp_size=4)[2] == 4 * received(sparse)[2]  # each rank gathers the one latent key


def test_nothing_hides_what_mixers_exchange():
    model = CostModel(linear=100, quadratic=3, cp_all_to_all=10, cp_all_gather=7)
    for size, per_token in ((1, 0), (2, 5 + 7), (4, 8 + 21)):
        assert model.summed_over_cp(size)(10) == 10 * (100 + per_token) + 300
