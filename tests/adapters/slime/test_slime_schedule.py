"""slime's `build_dp_schedule` with the adapter in it: slime's invariants and more, on what slime itself gets wrong.

On a double of slime's modules, also where the hook is bound, and with SLIME_CHECKOUT (marked `checkout`) on its own.
"""

import importlib
import json
import os
import pickle
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from slime_double import FIVE_LONG, SCHEDULE, build_dp_schedule, parallel_config, put_in_place, qwen3_4b

from megatron_balance import BalanceError, CostModel, ModelShape
from megatron_balance.adapters import slime
from megatron_balance.lengths import synthetic_lengths
from megatron_balance.model.hf_config import PRESETS

QWEN3_4B = CostModel.from_shape(ModelShape.preset("Qwen3-4B"))


def plan(lengths, *, args=None, config=None, rollouts=None, global_batch_size=None, checkout=None, **options):
    """`(partitions, micro_batch_indices, num_microbatches, global_batch_sizes)` of the hooked function.

    A Ray actor gets it pickled: by value, with its options, not by the name of the function that it replaces.
    """
    rollouts = list(range(len(lengths))) if rollouts is None else rollouts
    with pytest.MonkeyPatch.context() as patch:
        rollout = put_in_place(patch, checkout=checkout)
        installed = slime.install(**options)
        # cloudpickle, which Ray has, takes a function by value that its module no longer has.
        build = rollout.build_dp_schedule if checkout else pickle.loads(pickle.dumps(rollout.build_dp_schedule))
        installed.undo()
        return build(
            args or qwen3_4b(),
            config or parallel_config(),
            lengths,
            global_batch_size=global_batch_size or len(set(rollouts)),
            rollout_indices=rollouts,
        )


def slots_of(schedule):
    """For every rank, for every micro-batch, positions in the rollout batch."""
    partitions, indices, _, _ = schedule
    return [
        [[part[i] for i in slot_ids] for slot_ids in slots] for part, slots in zip(partitions, indices, strict=True)
    ]


def costs(schedule, lengths, cost=QWEN3_4B):
    """`[dp_size, num_microbatches]`, without the work of experts that a group shares."""
    return np.array([[sum(cost.local_cost(lengths[s]) for s in ids) for ids in slots] for slots in slots_of(schedule)])


def over_mean(rank_costs):
    return float(rank_costs.max() * len(rank_costs) / rank_costs.sum())


def check(schedule, lengths, *, expected=None, cap=9216, multiple=1):
    """slime's invariants, as its own tests assert them, the cap and no empty micro-batch besides."""
    partitions, indices, num_microbatches, _ = schedule
    padded = [-(-length // multiple) * multiple for length in lengths]
    for partition, slots in zip(partitions, indices, strict=True):
        assert len(slots) == sum(num_microbatches)
        assert [i for slot_ids in slots for i in slot_ids] == list(range(len(partition)))
        assert all(slots)
        assert all(len(slot_ids) == 1 or sum(padded[partition[i]] for i in slot_ids) <= cap for slot_ids in slots)
    ids_by_rank = sorted(sample for partition in partitions for sample in partition)
    assert ids_by_rank == (list(range(len(lengths))) if expected is None else expected)


@given(
    lengths=st.lists(st.integers(min_value=0, max_value=14000), min_size=1, max_size=60),
    dp_size=st.sampled_from([1, 2, 4, 8]),
    cp_size=st.sampled_from([1, 2, 4]),
    group=st.sampled_from([1, 2, 4]),
)
@settings(max_examples=60)
def test_any_lengths(lengths, dp_size, cp_size, group):
    """R35, R37: also with context parallelism, on padded lengths, and with a pipeline's group.

    slime is 1.26 times over the cap at CP 4, and leaves a rank empty where all lengths are zero.
    """
    config = parallel_config(dp_size, cp_size=cp_size, vpp_size=1 + (group > 1), group=group)
    lengths = [*lengths, *[0] * (-len(lengths) % (dp_size * group))]
    assume(sum(length > 4608 for length in lengths) * 2 <= len(lengths))
    schedule = plan(lengths, config=config)
    check(schedule, lengths, cap=9216 * cp_size, multiple=2 * cp_size if cp_size > 1 else 1)
    assert all(count % group == 0 for count in schedule[2])


def test_slimes_own_example():
    """The partition that slime's test_balance_data_distributes_by_flops asks for, with the arguments it gives."""
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "num_query_groups": 2, "vocab_size": 32, "kv_channels": 8}
    sizes |= {"ffn_hidden_size": 64, "num_layers": 2, "num_experts": None}
    limits = {"micro_batch_size": 1, "use_dynamic_batch_size": False, "max_tokens_per_gpu": None}
    args = SimpleNamespace(balance_data=True, balance_by_flops=False, **limits, **sizes)
    schedule = plan([1, 2, 3, 4, 5, 7, 9, 10], args=args, config=parallel_config(2))
    assert schedule == ([[1, 2, 5, 6], [0, 3, 4, 7]], [[[0], [1], [2], [3]]] * 2, [4], [8])


@pytest.mark.parametrize(
    ("lengths", "cap", "dp_size", "samples", "num_microbatches"),
    [([0] * 16, 9216, 4, [4] * 4, 1), ([4096] * 72, 32768, 8, [9] * 8, 2)],
    ids=["no tokens", "slime: 12, 12, 8, 8, …"],
)
def test_samples_of_each_rank(lengths, cap, dp_size, samples, num_microbatches):
    schedule = plan(lengths, args=qwen3_4b(max_tokens_per_gpu=cap), config=parallel_config(dp_size))
    check(schedule, lengths, cap=cap)
    assert sorted(map(len, schedule[0])) == samples
    assert schedule[2] == [num_microbatches]


WHERE = pytest.mark.parametrize("checkout", [None, pytest.param("SLIME_CHECKOUT", marks=pytest.mark.checkout)])


@WHERE
def test_a_batch_with_a_step_of_too_few_samples_is_slimes_own(checkout, caplog):
    """Masked copies in the place of what is missing ended runs of reinforce_plus_plus, and made MTP's gradients NaN."""
    checkout = checkout and os.environ[checkout]
    lengths, args, rollouts = [*FIVE_LONG, *[4000] * 4], qwen3_4b(), [0] * 5 + [1] * 4
    schedule = plan(lengths, args=args, rollouts=rollouts, global_batch_size=1, checkout=checkout)
    with pytest.MonkeyPatch.context() as patch:
        build = put_in_place(patch, checkout=checkout).build_dp_schedule
        sizes = {"global_batch_size": 1, "rollout_indices": rollouts}
        assert schedule == build(args, parallel_config(), lengths, **sizes)
    assert "1 of 2 steps have fewer samples than micro-batches" in caplog.text


def test_where_slime_fails_too_its_error_says_so():
    for lengths in ([9000, 9000, 8000, 9000, 9000], [500, 300]):
        with pytest.raises(AssertionError, match="could only produce"):
            plan(lengths)


def test_siblings_share_a_step_and_trailing_rollouts_drop():
    rollouts = [0, 0, 1, 2, 2, 3, 4, 4]
    lengths = [300, 200, 400, 100, 500, 600, 700, 800]
    schedule = plan(lengths, config=parallel_config(2), rollouts=rollouts, global_batch_size=2)
    check(schedule, lengths, expected=[0, 1, 2, 3, 4, 5])
    _, _, num_microbatches, global_batch_sizes = schedule
    assert global_batch_sizes == [2, 2]
    first = [id_ for slots in slots_of(schedule) for ids in slots[: num_microbatches[0]] for id_ in ids]
    assert sorted(first) == [0, 1, 2]


@pytest.mark.parametrize("flags", [(True, False), (True, True), (False, True)])
def test_either_flag_balances_by_flops(flags):
    """R33, R39: FLOPs serve packing and rank assignment.

    GSM8K fills three micro-batches for four ranks; slime halves one, and a rank has 1.33 times the mean.
    """
    lengths = synthetic_lengths("gsm8k_sft", num_samples=128, seed=0).tolist()
    assert 2 * 9216 < sum(lengths) <= 3 * 9216
    schedule = plan(lengths, args=qwen3_4b(balance_data=flags[0], balance_by_flops=flags[1]))
    check(schedule, lengths)
    assert schedule[2] == [1]
    assert over_mean(costs(schedule, lengths).sum(axis=1)) <= 1.001


def test_without_a_flag_slimes_own_runs_and_refuses_in_its_own_words():
    args = qwen3_4b(balance_data=False)
    del args.balance_by_flops  # as before slime had it
    config, rollouts = parallel_config(), [0, 1, 2, 3]
    stock = build_dp_schedule(args, config, [10, 20, 30, 40], global_batch_size=4, rollout_indices=rollouts)
    assert plan([10, 20, 30, 40], args=args) == stock
    with pytest.raises(AssertionError, match="num_rollouts"):
        plan([3] * 6, rollouts=[0, 0, 1, 1, 2, 2], global_batch_size=4)


def test_dynamic_batches_need_a_cap():
    with pytest.raises(BalanceError, match="max_tokens_per_gpu"):
        plan([10] * 8, args=qwen3_4b(max_tokens_per_gpu=None))


def test_a_cost_and_a_model_of_ones_own():
    """R34, R36, R40: the same FLOPs by slime's arguments and by the model's name."""
    lengths = synthetic_lengths("code_files", num_samples=64, seed=4).clip(max=9216).tolist()
    assert over_mean(costs(plan(lengths, cost="tokens"), lengths, CostModel.tokens()).sum(axis=1)) <= 1.002
    assert plan(lengths, args=qwen3_4b(hidden_size=None), model="Qwen3-4B") == plan(lengths)


@pytest.mark.parametrize(
    ("module", "checkpoint", "described"),
    [("qwen3_next", *["Qwen3-Next-80B-A3B"] * 2), ("glm5.glm5", "GLM-5", "GLM-5"), ("glm4", "GLM-5", "Qwen3-4B")],
)
def test_layers_that_only_the_checkpoint_tells(tmp_path, module, checkpoint, described):
    """With these specs layers have linear or sparse attention, and no argument says so; for GLM-4 arguments say all."""
    (tmp_path / "config.json").write_text(json.dumps(PRESETS[checkpoint]))
    args = qwen3_4b(spec=[f"slime_plugins.models.{module}", "get_spec"], hf_checkpoint=str(tmp_path))
    cost_model, expected = slime.SlimeOptions().cost_model(args), CostModel.from_shape(ModelShape.preset(described))
    assert (cost_model.linear, cost_model.quadratic, cost_model.windows) == (
        expected.linear,
        expected.quadratic,
        expected.windows,
    )


MOE = {"num_experts": 128, "moe_router_topk": 8, "moe_ffn_hidden_size": 768, "expert_model_parallel_size": 4}


@pytest.mark.parametrize(
    ("sizes", "objective"), [(MOE, "auto"), ({}, "microbatch"), ({"use_torch_fsdp2": True}, "auto")]
)
def test_ranks_that_meet_in_every_micro_batch(sizes, objective):
    """R42, the MoE setups: expert-parallel groups over four ranks. The slots of a group have equal cost."""
    lengths = synthetic_lengths("code_files", num_samples=64, seed=6).clip(max=4096).tolist()  # a step's plan waits 2 %
    args = qwen3_4b(max_tokens_per_gpu=4096, **sizes)
    schedule = plan(lengths, args=args, objective=objective)
    check(schedule, lengths, cap=4096)
    grid = costs(schedule, lengths, slime.SlimeOptions().cost_model(args))
    assert grid.max(axis=0).sum() * 4 <= 1.01 * grid.sum()


def sample_means(args, batch, values, sum_of_sample_mean):
    """A custom loss of slime: of one value a token."""
    return sum_of_sample_mean(values), {}


@pytest.mark.checkout
@pytest.mark.parametrize("per_token", [False, True])
def test_slimes_loss_does_not_depend_on_the_plan(monkeypatch, per_token):
    """It is normalised over the step: by rollouts, or by tokens."""
    checkout, dp_size = os.environ["SLIME_CHECKOUT"], 4
    lengths = synthetic_lengths("gsm8k_sft", num_samples=32, seed=0).tolist()
    balanced = slots_of(plan(lengths, args=qwen3_4b(max_tokens_per_gpu=640), checkout=checkout))
    put_in_place(monkeypatch, checkout=checkout)
    losses = importlib.import_module("slime.backends.megatron_utils.loss")
    monkeypatch.setattr(losses.mpu, "get_context_parallel_world_size", lambda: 1)
    monkeypatch.setattr(losses.mpu, "get_data_parallel_world_size", lambda with_context_parallel: dp_size)
    options = {"loss_type": "custom_loss", "custom_loss_function_path": f"{__name__}.sample_means"}
    args = SimpleNamespace(**options, recompute_loss_function=False, allgather_cp=False)
    args.calculate_per_token_loss = per_token
    generator = torch.Generator().manual_seed(0)
    masks = [torch.rand(length, generator=generator) < 0.5 for length in lengths]
    values = [torch.randn(length, generator=generator) for length in lengths]

    def loss(ranks):
        """As Megatron adds them up over micro-batches and ranks."""
        total = counted = 0.0
        for slots in ranks:
            for slot in slots:
                picked = [lengths[sample] for sample in slot]
                batch = {"total_lengths": picked, "response_lengths": picked, "rollout_mask_sums": None}
                batch["loss_masks"] = [masks[sample] for sample in slot]
                tokens = torch.cat([values[sample] for sample in slot])
                part, count, _ = losses.loss_function(args, batch, len(slots), len(lengths), tokens)
                total += float(part) if per_token else float(part) / len(slots) / dp_size
                counted += float(count)
        return total / counted if per_token else total

    assert len(balanced[0]) > 1
    one_by_one = [[[sample] for sample in range(rank, len(lengths), dp_size)] for rank in range(dp_size)]
    assert loss(balanced) == pytest.approx(loss(one_by_one), rel=1e-5)


# Where the hook is bound ---------------------------------------------------------------------------------


@pytest.fixture
def rollout(monkeypatch):
    """`slime.ray.rollout` of the double; nothing stays installed."""
    yield put_in_place(monkeypatch)
    slime.installation.undo()


def bound(rollout):
    return [vars(module)["build_dp_schedule"] for module in (sys.modules[SCHEDULE], rollout)]


def test_too_late_is_refused(rollout):
    """Ray has pickled the actor's class."""
    metadata = SimpleNamespace(last_export_cluster_and_job="session", class_name="RolloutManager")
    vars(rollout)["RolloutManager"] = SimpleNamespace(__ray_metadata__=metadata)
    before = bound(rollout)
    with pytest.raises(BalanceError, match="RolloutManager was started already"):
        slime.install()
    assert bound(rollout) == before
