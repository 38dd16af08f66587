"""Megatron's configuration of a shape and back, and the layers it builds."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from small_shapes import DENSE, EXPERTS, LATENT, LAYERS, SEQUENCES

from megatron_balance.errors import BalanceError
from megatron_balance.model.flops import fwd_flops
from megatron_balance.model.layers import Layer
from megatron_balance.model.presets import PRESETS
from megatron_balance.model.shape import ModelShape

torch = pytest.importorskip("torch")
transformer_config = pytest.importorskip("megatron.core.transformer.transformer_config")

from megatron_balance.mcore.calibration.model_config import block_spec_of, layer_spec_of, transformer_config_of  # noqa: E402
from megatron_balance.mcore.thd.attention import ThdAttention  # noqa: E402

SCRIPT = Path(__file__).with_name("layer_runs.py")


# There and back -------------------------------------------------------------------------------------------------------


def there_and_back(shape: ModelShape) -> ModelShape:
    return ModelShape.from_transformer_config(
        transformer_config_of(shape),
        padded_vocab_size=shape.padded_vocab_size,
        hybrid_layer_pattern=shape.hybrid_layer_pattern,
    )


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_comes_back(name: str) -> None:
    shape = replace(ModelShape.preset(name), vision=None)  # of a language model
    assert there_and_back(shape) == shape


@pytest.mark.parametrize(
    "change",
    [
        {"mtp_num_layers": 2},
        {"window_size": (7, 0)},
        {"window_size": (-1, 0), "window_attn_skip_freq": (1, 0)},
        {"attention_output_gate": True, "gated_linear_unit": False},
        {**EXPERTS, "moe_latent_size": 16, "moe_layer_freq": (0, 1)},
        {**LATENT, "q_lora_rank": 0},
    ],
)
def test_every_field_comes_back(change: dict[str, Any]) -> None:
    shape = replace(DENSE, **change)
    assert there_and_back(shape) == shape


def test_the_first_layers_only() -> None:
    shape = ModelShape.preset("DeepSeek-V3")
    config = transformer_config_of(shape, num_layers=4, params_dtype=torch.bfloat16, recompute=True)
    assert (config.num_layers, config.moe_layer_freq) == (4, [0, 0, 0, 1])
    assert (config.bf16, config.recompute_granularity) == (True, "full")
    with pytest.raises(BalanceError, match="num_layers is 62: it must be between 1 and the shape's 61"):
        transformer_config_of(shape, num_layers=62)


def test_frequencies_are_read_as_megatron_reads_them() -> None:
    sizes = {"num_layers": 4, "hidden_size": 64, "num_attention_heads": 4}
    config = transformer_config.TransformerConfig(
        **sizes, num_moe_experts=4, moe_layer_freq=2, window_size=(7, 0), window_attn_skip_freq=4
    )
    shape = ModelShape.from_transformer_config(config, padded_vocab_size=100)
    assert shape.moe_layer_freq == (1, 0, 1, 0)
    assert [layer.window for layer in shape.decoder_layers()] == [8, 8, 8, 0]
    assert (shape.num_query_groups, shape.kv_channels, shape.ffn_hidden_size) == (4, 16, 256)
    assert not shape.gated_linear_unit
    linear = {"experimental_attention_variant": "gated_delta_net", "linear_attention_freq": 4}
    config = transformer_config.TransformerConfig(**sizes, **linear)
    assert ModelShape.from_transformer_config(config, padded_vocab_size=100).linear_attention_freq == (1, 1, 1, 0)


def test_latent_attention_takes_the_defaults_of_its_class() -> None:
    config = transformer_config.MLATransformerConfig(num_layers=1, hidden_size=64, num_attention_heads=4)
    shape = ModelShape.from_transformer_config(config, padded_vocab_size=100)
    assert (shape.q_lora_rank, shape.kv_lora_rank, shape.qk_head_dim) == (512, 512, 128)
    assert shape.decoder_layers() == (Layer("mla", "dense"),)


def test_what_a_configuration_does_not_say_is_asked_for() -> None:
    shape = ModelShape.preset("Nemotron-H-8B")
    with pytest.raises(BalanceError, match="hybrid_layer_pattern is not given"):
        ModelShape.from_transformer_config(transformer_config_of(shape), padded_vocab_size=100)
    with pytest.raises(BalanceError, match="config is a dict without ffn_hidden_size"):
        ModelShape.from_transformer_config({}, padded_vocab_size=100)
    config = transformer_config_of(DENSE)
    config.heterogeneous_block_specs = True
    with pytest.raises(BalanceError, match="heterogeneous_block_specs is set"):
        ModelShape.from_transformer_config(config, padded_vocab_size=100)


# Stacks of one kind ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PRESETS)
def test_every_kind_of_layer_of_every_preset_can_be_stacked(name: str) -> None:
    shape = ModelShape.preset(name)
    for layer in {*shape.decoder_layers(), *shape.mtp_layers()}:
        stack = shape.stack_of(layer, num_layers=3)
        assert stack.decoder_layers() == (layer,) * 3
        assert fwd_flops(there_and_back(stack)) == fwd_flops(stack)


@pytest.mark.parametrize(
    ("layer", "needed"),
    [
        (Layer("gated_delta_net", "dense"), "flash-linear-attention"),
        (Layer("mamba", None), "mamba-ssm"),
        (Layer("dsa", "moe"), "fast-hadamard-transform"),
    ],
)
def test_a_kind_that_cannot_be_built_is_named(layer: Layer, needed: str) -> None:
    with pytest.raises(BalanceError, match=rf"{layer.mixer} layer cannot be built.*{needed}"):
        layer_spec_of(transformer_config_of(DENSE), layer=layer)


def test_as_many_kinds_as_layers() -> None:
    with pytest.raises(BalanceError, match="layers holds 1 kinds: the configuration has num_layers 2"):
        block_spec_of(transformer_config_of(DENSE), layers=DENSE.decoder_layers()[:1])


@pytest.fixture(scope="module")
def stacks() -> dict[str, dict[str, float]]:
    done = subprocess.run([sys.executable, SCRIPT, "run-stacks"], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", LAYERS)
def test_a_stack_keeps_packed_sequences_apart(stacks: dict[str, dict[str, float]], name: str) -> None:
    assert stacks[name]["difference"] < 1e-5


@pytest.mark.parametrize("name", LAYERS)
def test_a_stack_of_two_sees_as_far_as_its_kind(stacks: dict[str, dict[str, float]], name: str) -> None:
    layer = LAYERS[name]
    reach = 1 if layer.mixer is None else 2 * (layer.window - 1) + 1 if layer.window else SEQUENCES[-1]
    assert stacks[name]["reach"] == reach


@pytest.mark.parametrize("name", LAYERS)
def test_every_weight_of_a_stack_learns(stacks: dict[str, dict[str, float]], name: str) -> None:
    assert stacks[name]["least_weight_gradient"] > 0


# Windows on a CPU -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [1, 3, 64, 300])
@pytest.mark.parametrize("lengths", [(200,), (5, 1, 131, 64)])
def test_a_window_in_blocks_is_a_masked_whole(window: int, lengths: tuple[int, ...]) -> None:
    packed_seq_params = pytest.importorskip("megatron.core.packed_seq_params")
    config = transformer_config_of(replace(DENSE, num_query_groups=2, window_size=(window - 1, 0)))
    attention = ThdAttention(config, 1, None, "self")
    starts = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    generator = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(sum(lengths), heads, 8, generator=generator, requires_grad=True) for heads in (4, 2, 2)
    )
    output = attention(
        query, key, value, packed_seq_params=packed_seq_params.PackedSeqParams(qkv_format="thd", cu_seqlens_q=starts)
    )

    position = torch.arange(sum(lengths))
    sequence = torch.bucketize(position, starts, right=True)
    distance = position[:, None] - position[None, :]
    sees = (distance >= 0) & (distance < window) & (sequence[:, None] == sequence[None, :])
    scores = torch.einsum("qhd,khd->hqk", query, key.repeat_interleave(2, dim=1)) / 8**0.5
    weights = scores.masked_fill(~sees, -torch.inf).softmax(-1)
    expected = torch.einsum("hqk,khd->qhd", weights, value.repeat_interleave(2, dim=1)).flatten(1)
    torch.testing.assert_close(output, expected)
    inputs = (query, key, value)
    torch.testing.assert_close(torch.autograd.grad(output.sum(), inputs), torch.autograd.grad(expected.sum(), inputs))


def test_only_the_windowed_layers_have_one() -> None:
    config = transformer_config_of(replace(DENSE, window_size=(7, 0), window_attn_skip_freq=(1, 0)))
    assert [ThdAttention(config, number, None, "self").window for number in (1, 2)] == [8, 0]
    assert ThdAttention(transformer_config_of(replace(DENSE, window_size=(-1, 0))), 1, None, "self").window == 0
