"""Static bytes and a dense layer's activations against Megatron's own estimate.

`megatron/training/theoretical_memory_usage.py` is written from the same paper by others. Where it is not what a run
keeps, the difference is asserted, so that a mended upstream is noticed. Megatron's estimate

- shares the distributed optimizer among data-parallel ranks alone, where it is shared with context-parallel ones too;
- shares MLA's down projections among tensor-parallel ranks, each of which has them whole;
- puts multi-token prediction on the stage with the embedding, without its projection and norms;
- forgets gated delta nets, Mamba and output gates, and counts no rotated queries and keys;
- of activations knows neither gated MLPs, grouped keys, experts nor recomputation.
"""

from __future__ import annotations

from argparse import Namespace
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("megatron.training")

from megatron.training import theoretical_memory_usage as theirs
from test_flops_oracle import namespace

from megatron_balance.memory.activations import bytes_per_token, kept_by_layer
from megatron_balance.memory.model import TrainingMemory, memory_model
from megatron_balance.memory.precision import Precision
from megatron_balance.model.shape import ModelShape
from megatron_balance.topology import Topology

DENSE = ["Qwen2.5-0.5B", "Qwen3-8B", "Llama-3.1-8B"]
MOE = ["Qwen3-30B-A3B", "Mixtral-8x7B", "DeepSeek-V3"]


def megatron_args(shape: ModelShape, *, topology: Topology, distributed_optimizer: bool, untied: bool) -> Namespace:
    """The arguments that Megatron's estimate reads."""
    tp, pp, ep = topology.tp_size, topology.pp_size, topology.ep_size
    changes: dict[str, Any] = {
        "normalization": "RMSNorm",
        "add_bias_linear": False,
        "untie_embeddings_and_output_weights": untied,
        "use_distributed_optimizer": distributed_optimizer,
        "data_parallel_size": topology.dp_size,
        "world_size": topology.dp_size * topology.cp_size * tp * pp,
        "tensor_model_parallel_size": tp,
        "pipeline_model_parallel_size": pp,
        "expert_model_parallel_size": ep,
        "expert_tensor_parallel_size": topology.etp_size,
        "moe_shared_expert_gate": False,
    }
    return namespace(shape, **changes)


def static_bytes(shape: ModelShape, topology: Topology, *, distributed_optimizer: bool, untied: bool) -> list[int]:
    training = TrainingMemory(distributed_optimizer=distributed_optimizer, untied_embeddings=untied)
    return [stage.static_bytes for stage in memory_model(shape, topology=topology, training=training).stages]


@pytest.mark.parametrize("untied", [True, False])
@pytest.mark.parametrize("distributed_optimizer", [True, False])
@pytest.mark.parametrize("name", [*DENSE, *MOE])
def test_weights_gradients_and_optimizer_agree(name: str, distributed_optimizer: bool, untied: bool) -> None:
    shape, how = ModelShape.preset(name), {"distributed_optimizer": distributed_optimizer, "untied": untied}
    for topology in (Topology(8), Topology(8, ep_size=8)):
        if topology.ep_size > max(shape.num_experts, 1):
            continue
        expected = theirs.compute_weight_and_optimizer_memory(megatron_args(shape, topology=topology, **how))
        assert static_bytes(shape, topology, **how)[0] == pytest.approx(expected, rel=1e-9, abs=2)


@pytest.mark.parametrize("name", [name for name in (*DENSE, *MOE) if name != "DeepSeek-V3"])
def test_they_agree_on_the_first_stage_of_split_models_but_for_the_last_norm(name: str) -> None:
    shape, how = ModelShape.preset(name), {"distributed_optimizer": True, "untied": True}
    topology = Topology(4, tp_size=2, pp_size=4, ep_size=1, etp_size=2)
    args = megatron_args(shape, topology=topology, **how)
    last_norm = shape.hidden_size / 4 * (6 + 12 / 4)
    expected = theirs.compute_weight_and_optimizer_memory(args) - last_norm
    assert static_bytes(shape, topology, **how)[0] == pytest.approx(expected, rel=1e-9, abs=2)


def test_megatron_does_not_share_the_optimizer_with_context_parallel_ranks() -> None:
    shape, how = ModelShape.preset("Qwen3-8B"), {"distributed_optimizer": True, "untied": True}
    (ours,) = static_bytes(shape, Topology(4, cp_size=2), **how)
    args = megatron_args(shape, topology=Topology(4, cp_size=2), **how)
    assert ours < theirs.compute_weight_and_optimizer_memory(args)
    args.data_parallel_size = 8
    assert ours == pytest.approx(theirs.compute_weight_and_optimizer_memory(args), rel=1e-9)


def test_megatron_shares_the_down_projections_of_latent_attention() -> None:
    shape, how = ModelShape.preset("DeepSeek-V3"), {"distributed_optimizer": False, "untied": True}
    topology = Topology(4, tp_size=2, etp_size=2)
    (ours,) = static_bytes(shape, topology, **how)
    expected = theirs.compute_weight_and_optimizer_memory(megatron_args(shape, topology=topology, **how))
    down = shape.hidden_size * (shape.q_lora_rank + shape.kv_lora_rank + shape.qk_pos_emb_head_dim)
    norms = shape.q_lora_rank + shape.kv_lora_rank
    assert ours - expected == pytest.approx(18 * shape.num_layers * (down + norms) / 2, rel=1e-6)


@pytest.mark.parametrize("tp_size", [1, 4])
def test_a_dense_layer_keeps_what_megatron_says_and_rotated_queries_and_keys(tp_size: int) -> None:
    """18h + 4f bytes a token; ours with rotary angles 4h more, and 4 bytes a head and norm of statistics."""
    shape = replace(
        ModelShape.preset("Qwen2.5-0.5B"), num_attention_heads=16, num_query_groups=16, kv_channels=56,
        gated_linear_unit=False, ffn_hidden_size=4 * 896,
    )  # fmt: skip
    topology = Topology(1, tp_size=tp_size, sequence_parallel=tp_size > 1)
    kept = kept_by_layer(
        shape, layer=shape.decoder_layers()[0], precision=Precision(qk_layernorm=False, hidden_dropout=True)
    )
    ours = bytes_per_token(kept, topology=topology, recompute_modules=frozenset(), expert_imbalance=1.0)
    args = Namespace(
        seq_length=1, micro_batch_size=1, hidden_size=896, ffn_hidden_size=4 * 896, padded_vocab_size=0,
        tensor_model_parallel_size=tp_size, pipeline_model_parallel_size=1, virtual_pipeline_model_parallel_size=None,
    )  # fmt: skip
    of_layers = [
        theirs.compute_activation_memory(Namespace(**vars(args), num_layers=layers), num_microbatches=1)
        for layers in (1, 2)
    ]
    expected = of_layers[1] - of_layers[0]
    assert ours - expected == pytest.approx((4 * 896 + 4 * 16 + 2 * 4) / tp_size)
