"""What a run's settings are, read from Megatron's options: ranks, costs, routers, the record of a resumed run.

It reads below the public names: a run has no name for its settings, and shows most of them only on many ranks.
"""

import inspect
import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
from megatron.core.ssm.mamba_context_parallel import MambaContextParallel
from test_options import BALANCED, EXPERTS, PACKED, SHAPE, parsed

from megatron_balance import BalanceError, CostModel, Limits, ModelShape, Topology
from megatron_balance.cost.calibration import Calibration
from megatron_balance.cost.rates import run_costs
from megatron_balance.mcore.setup.settings import settings_of
from megatron_balance.model.layout import PipelineLayout

WITHIN, BETWEEN = 0.0087, 0.078
"""Parts of a token's linear cost."""

TP2_PP2 = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2"
SIZED = f"{PACKED} --balance-by-flops --balance-dynamic-cp"


def settings(flags, *, shape=SHAPE, **validated):
    """Of 16 ranks; `validated` are options that Megatron sets itself."""
    args = parsed(f"--eval-iters 0 --bf16 {flags}", balanced=BALANCED)
    return settings_of(vars(args) | {"world_size": 16} | validated, shape=lambda: shape)


@pytest.mark.parametrize(
    ("flags", "validated", "topology"),
    [
        ("", {}, Topology(16)),
        (f"{TP2_PP2} --sequence-parallel", {}, Topology(4, tp_size=2, etp_size=2, pp_size=2, sequence_parallel=True)),
        ("--context-parallel-size 4 --use-torch-fsdp2", {}, Topology(4, cp_size=4, fully_sharded=True)),
        ("--use-megatron-fsdp", {}, Topology(16, fully_sharded=True)),
        (f"{EXPERTS} --expert-model-parallel-size 4", {}, Topology(16, ep_size=4)),
        (
            "--pipeline-model-parallel-size 2",
            {"virtual_pipeline_model_parallel_size": 3},
            Topology(8, pp_size=2, vpp_size=3, microbatch_multiple=2),
        ),
        (
            "--pipeline-model-parallel-size 2 --microbatch-group-size-per-virtual-pipeline-stage 4",
            {"virtual_pipeline_model_parallel_size": 3},
            Topology(8, pp_size=2, vpp_size=3, microbatch_multiple=4),
        ),
        ("--fp8-format hybrid --fp8-recipe mxfp8", {"fp8": "hybrid"}, Topology(16, token_alignment=32)),
        (f"{SIZED} 4", {}, Topology(16, dynamic_cp=True, max_cp_size=4)),
        (f"--context-parallel-size 2 {SIZED}", {}, Topology(8, cp_size=2, dynamic_cp=True)),
    ],
)
def test_ranks(flags, validated, topology):
    assert settings(flags, **validated).topology == topology


@pytest.mark.parametrize(
    ("model", "flags", "largest"),
    [
        ("Qwen3.5-35B-A3B", "--tensor-model-parallel-size 4", 4),  # 16 key heads
        ("Nemotron-3-Nano-30B-A3B", "--tensor-model-parallel-size 8", 8),  # 64 heads, in 8 groups that are repeated
        ("gpt-oss-20b", "--cp-comm-type a2a", 8),  # 8 query groups
        ("DeepSeek-V3", "", None),
    ],
)
def test_the_largest_context_parallel_size_is_that_of_the_heads(model, flags, largest):
    shape = ModelShape.preset(model)
    sized = settings(f"{SIZED} {flags}", shape=shape)
    assert sized.topology.max_cp_size == largest
    named = any(line.startswith(f"at most {largest} ranks share a sample") for line in sized.log_lines)
    assert named is (largest is not None)
    if largest is not None:
        with pytest.raises(BalanceError, match=f"--balance-dynamic-cp is {2 * largest}, but at most {largest} ranks"):
            settings(f"{SIZED} {2 * largest} {flags}", shape=shape)


FSDP = "--use-megatron-fsdp --use-dynamic-batch-size --max-tokens-per-gpu 8192 --balance-cost"


@pytest.mark.parametrize(
    ("flags", "passes", "bandwidth"),
    [
        ("flops", 2, 400),
        ("flops --data-parallel-sharding-strategy optim_grads_params", 2, 400),
        ("flops --data-parallel-sharding-strategy optim_grads", 0, 400),  # whose weights stay on every rank
        ("flops --tensor-model-parallel-size 8", 2, 50),  # a rank of its group is alone on its node
        ("tokens", 0, 0),
    ],
)
def test_fsdp_gathers_weights_in_every_micro_batch(flags, passes, bandwidth):
    fsdp = settings(f"{FSDP} {flags}", shape=ModelShape.preset("Qwen3-8B"))
    weights = 8.19e9 - 0.62e9  # of its card, without the embeddings
    assert fsdp.costs.model.gather == pytest.approx(passes * 2 * weights / max(bandwidth, 1) * 400e3, rel=0.01)
    assert any(f"gathers weights in every micro-batch at {bandwidth} GB/s" in line for line in fsdp.log_lines) is (
        passes > 0
    )
    assert any("Tokens do not count" in line for line in fsdp.log_lines) is (flags == "tokens")


def test_experts_are_gathered_all_on_the_ranks_that_have_them():
    shape, ranks = ModelShape.preset("Qwen3-30B-A3B"), f"{FSDP} flops {EXPERTS} --expert-model-parallel-size"
    gathers = [settings(f"{ranks} {size}", shape=shape).costs.model.gather for size in (1, 8)]
    experts = 48 * 128 * 3 * 2048 * 768  # layers, experts, matrices of 2048 x 768
    assert gathers[0] - gathers[1] == pytest.approx(2 * 2 * experts * 7 / 8 / 400 * 400e3, rel=1e-6)


@pytest.mark.parametrize("tp_size", [1, 2, 4])
@pytest.mark.parametrize("groups", [1, 4, 8, 32])
def test_sizes_of_mamba_are_those_that_megatron_takes(groups, tp_size):
    if groups % tp_size:
        return
    heads = 96
    shape = replace(ModelShape.preset("Nemotron-3-Nano-30B-A3B"), mamba_num_heads=heads, mamba_num_groups=groups)

    def takes(size):
        sizes = dict.fromkeys(inspect.signature(MambaContextParallel).parameters, 1)
        sizes |= {"nheads_local_tp": heads // tp_size, "ngroups_local_tp": groups // tp_size}
        try:
            MambaContextParallel(**sizes | {"cp_group": SimpleNamespace(size=lambda: size, rank=lambda: 0)})
        except AssertionError:
            return False
        return True

    largest = shape.largest_cp_size(tp_size)
    assert largest == max(size for size in (1, 2, 4, 8, 16, 32, 64) if takes(size))


@pytest.mark.parametrize(
    ("flags", "count"),
    [
        ("", False),
        ("--moe-z-loss-coeff 1e-3", False),  # there are no experts
        (EXPERTS, False),
        (f"{EXPERTS} --moe-z-loss-coeff 1e-3", True),
        (f"{EXPERTS} --moe-aux-loss-coeff 1e-2", True),
        (f"{EXPERTS} --moe-router-enable-expert-bias --moe-router-score-function sigmoid", True),
    ],
)
def test_routers_that_count_tokens(flags, count):
    assert settings(flags).counts_router_tokens is count


@pytest.mark.parametrize(
    ("flags", "rounded"),
    [
        ("", True),
        ("--position-embedding-type rope", True),
        ("--position-embedding-type rope --no-rope-fusion", False),  # a loop over sequences
        ("--no-rope-fusion", True),
        ("--position-embedding-type rope --experimental-attention-variant gated_delta_net", False),
    ],
)
def test_models_whose_kernels_take_empty_sequences(flags, rounded):
    assert settings(flags).few_shapes is rounded


def test_a_record_is_continued_where_a_checkpoint_was_loaded():
    resumes = [settings(flags, iteration=n).resumes for flags in ("", "--load here") for n in (0, 7)]
    assert resumes == [False, False, False, True], "the first run of a job has --load too, and no checkpoint yet"


@pytest.mark.parametrize(
    ("flags", "sharing"),
    [
        ("", 1),
        ("--context-parallel-size 2", 2),
        (f"--context-parallel-size 2 {TP2_PP2}", 4),
        (f"--context-parallel-size 2 {SIZED}", 1),  # the planner shares a sample among its ranks
        (f"--context-parallel-size 2 --tensor-model-parallel-size 2 {SIZED}", 2),
    ],
)
def test_measured_seconds_are_shared_by_the_ranks_of_a_sample(tmp_path, flags, sharing):
    file, costs = tmp_path / "seconds.json", CostModel(linear=4000, quadratic=400, per_microbatch=9, cp_exchange=8)
    Calibration(costs, held_out_error=None).write(file)
    model = settings(f"{PACKED} {flags} --balance-cost {file}").costs.model
    assert (model.linear, model.quadratic, model.per_microbatch) == (4000 / sharing, 400 / sharing, 9)


@pytest.mark.parametrize(
    ("flags", "layers"),
    [
        ("", (18, 18)),
        ("--decoder-last-pipeline-num-layers 16", (20, 16)),
        ("--pipeline-model-parallel-layout Et*10|t*10|t*10|t*6,L", (10, 10, 10, 6)),
    ],
)
def test_stages_cost_what_their_layers_do(tmp_path, flags, layers):
    flags = f"{PACKED} --pipeline-model-parallel-size 2 {flags}"
    validated = {"virtual_pipeline_model_parallel_size": len(layers) // 2}
    stages = CostModel.from_shape(SHAPE, layout=PipelineLayout(2, layers)).stages
    file, costs = tmp_path / "seconds.json", CostModel(linear=4000, quadratic=400)
    Calibration(costs, held_out_error=None).write(file)
    by_flops = settings(f"{flags} --balance-cost flops --balance-attention-rate 1", **validated)
    assert by_flops.costs.model.stages == stages
    assert settings(f"{flags} --balance-cost {file}", **validated).costs.model == replace(costs, stages=stages)
    assert settings(f"{flags} --balance-cost tokens", **validated).costs.model == replace(
        CostModel.tokens(), stages=stages
    )


@pytest.mark.parametrize(
    ("topology", "part"),
    [
        (Topology(8), 0),  # a sample is on one rank
        (Topology(8, dynamic_cp=True), WITHIN),
        (Topology(16, dynamic_cp=True), BETWEEN),
        (Topology(16, dynamic_cp=True, max_cp_size=8), WITHIN),  # groups fit a node of eight
        (Topology(8, dynamic_cp=True, max_cp_size=4, tp_size=2), WITHIN),
        (Topology(8, dynamic_cp=True, tp_size=2), BETWEEN),
        (Topology(4, dynamic_cp=True, tp_size=3), BETWEEN),  # over the end of a node
        (Topology(6, dynamic_cp=True), WITHIN),  # there is one node
    ],
)
def test_groups_within_a_node_exchange_over_its_links(topology, part):
    cost = run_costs({"balance_cost": "flops", "bf16": True}, topology=topology, shape=lambda: SHAPE).model
    assert cost.cp_exchange / cost.linear == pytest.approx(part, rel=0.02)


def test_one_size_receives_over_the_same_links():
    """Fault: it counted in predictions, but not in plans."""
    for topology, part in ((Topology(8, cp_size=2), WITHIN), (Topology(2, cp_size=16), BETWEEN)):
        cost = run_costs({"balance_cost": "flops", "bf16": True}, topology=topology, shape=lambda: SHAPE).model
        assert cost.cp_received / cost.linear == pytest.approx(part * (topology.cp_size - 1), rel=0.02)


@pytest.mark.parametrize("dynamic_cp", [False, True])
def test_every_context_parallel_rank_pays_the_fixed_cost_of_a_micro_batch(dynamic_cp):
    """Fault: at one size it was paid once by all of them, in plans but not in predictions."""
    topology = Topology(8, cp_size=4, dynamic_cp=dynamic_cp)
    cost = run_costs({"balance_cost": "flops", "bf16": True}, topology=topology, shape=lambda: SHAPE).model
    assert cost.per_microbatch == 128 * cost.linear * (1 if dynamic_cp else 4)


@pytest.mark.parametrize(
    ("flags", "caution"),
    [
        (PACKED, ""),
        ("--use-dynamic-batch-size --max-tokens-per-gpu 131072", "--max-tokens-per-gpu 131072: .* take 74.2 GiB"),
        ("--use-dynamic-batch-size --max-tokens-per-gpu 131072 --tensor-model-parallel-size 2", ""),
        (
            f"{PACKED} --seq-length 131072 --max-position-embeddings 131072",
            "--seq-length 131072: .* --seq-length 70670,",
        ),
        (f"{SIZED} --seq-length 131072 --max-position-embeddings 131072", ""),  # 16 ranks share a sample
    ],
)
def test_logits_that_take_half_of_a_device_are_named(flags, caution, monkeypatch):
    """tokens × vocabulary / TP × 4 bytes, of a full micro-batch and of the longest sample; the device has 80 GiB."""
    monkeypatch.setattr("megatron_balance.mcore.setup.settings.device_nbytes", lambda: 80 * 2**30)
    lines = [line for line in settings(flags, padded_vocab_size=151936).log_lines if "logits" in line]
    assert len(lines) == bool(caution)
    assert all(re.search(caution, line) and line.startswith("WARNING: ") for line in lines)


def test_the_cap_is_of_whole_shares_of_what_layers_take():
    """Shares of 32 tokens on two sequence-parallel ranks."""
    topology = Topology(2, cp_size=2, tp_size=2, sequence_parallel=True, token_alignment=32)
    for cap, rounded in ((1000, 960), (60, 64)):
        run = replace(settings(PACKED), topology=topology, limits=Limits(cap))
        assert run.planning["limits"] == Limits(rounded)
