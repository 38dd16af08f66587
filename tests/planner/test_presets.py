"""Presets and Hugging Face configurations."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_balance.errors import BalanceError
from megatron_balance.model.flops import calculate_fwd_flops, fwd_flops
from megatron_balance.model.presets import PRESETS
from megatron_balance.model.shape import ModelShape

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "vocab_size": 1000,
}


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_is_a_shape(name: str) -> None:
    shape = ModelShape.preset(name)
    assert len(shape.decoder_layers()) == shape.num_layers
    assert fwd_flops(shape).quadratic > 0


def test_names_are_case_insensitive() -> None:
    assert ModelShape.preset("QWEN3-8b") == ModelShape.preset("Qwen3-8B")


def test_an_unknown_preset_lists_the_names() -> None:
    with pytest.raises(BalanceError, match=r"'gpt5'.*Qwen2\.5-0\.5B.*from_hf_config"):
        ModelShape.preset("gpt5")


# Active parameters of the decoder as published, in billions: 2 FLOPs a token each, embeddings out.
@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("Qwen2.5-72B", 71.5),
        ("Llama-3.1-70B", 69.5),
        ("Mixtral-8x7B", 12.7),
        ("DeepSeek-V3", 36.6),
        ("gpt-oss-20b", 3.6),
    ],
)
def test_active_parameters_are_as_published(name: str, billions: float) -> None:
    flops = fwd_flops(ModelShape.preset(name))
    assert (flops.linear + flops.expert_linear) / 2e9 == pytest.approx(billions, rel=0.01)


def test_config_json_is_read_from_a_file_or_its_folder(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    shape = ModelShape.from_hf_config(LLAMA)
    assert ModelShape.from_hf_config(tmp_path) == shape
    assert ModelShape.from_hf_config(str(tmp_path / "config.json")) == shape
    assert (shape.num_query_groups, shape.kv_channels, shape.padded_vocab_size) == (4, 16, 1000)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(BalanceError, match=r"nowhere\.json cannot be read"):
        ModelShape.from_hf_config(tmp_path / "nowhere.json")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(BalanceError, match=r"config\.json cannot be read"):
        ModelShape.from_hf_config(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(BalanceError, match="holds an object"):
        ModelShape.from_hf_config(tmp_path)


def test_an_unknown_architecture_says_what_to_do() -> None:
    with pytest.raises(BalanceError, match=r"'rwkv'.*llama.*by tokens"):
        ModelShape.from_hf_config({"model_type": "rwkv"})
    with pytest.raises(BalanceError, match=r"layer_types has .'chunked_attention'"):
        ModelShape.from_hf_config(LLAMA | {"layer_types": ["chunked_attention"] * 4})


def test_a_missing_key_is_named() -> None:
    config = {key: value for key, value in LLAMA.items() if key != "vocab_size"}
    with pytest.raises(BalanceError, match="vocab_size is missing"):
        ModelShape.from_hf_config(config)


def test_a_multimodal_config_is_its_text_model() -> None:
    nested = {"model_type": "gemma3", "vision_config": {}, "text_config": PRESETS["gemma-3-12b"]}
    assert ModelShape.from_hf_config(nested) == ModelShape.preset("gemma-3-12b")


def test_gemma3_has_one_full_layer_in_six() -> None:
    shape = ModelShape.preset("gemma-3-12b")
    assert [layer.window for layer in shape.decoder_layers()[:7]] == [1024] * 5 + [0, 1024]
    # google/gemma-3-4b-it leaves the heads to the class's defaults.
    small = {"model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34}
    shape = ModelShape.from_hf_config(small | {"sliding_window": 1024})
    assert (shape.num_attention_heads, shape.num_query_groups, shape.kv_channels) == (8, 4, 256)


def test_gpt_oss_alternates_windows() -> None:
    layers = ModelShape.preset("gpt-oss-20b").decoder_layers()
    assert [layer.window for layer in layers[:4]] == [128, 0, 128, 0]


def test_qwen2_windows_only_when_told() -> None:
    qwen = LLAMA | {"model_type": "qwen2", "sliding_window": 32, "max_window_layers": 3}
    assert ModelShape.from_hf_config(qwen).window_size is None
    shape = ModelShape.from_hf_config(qwen | {"use_sliding_window": True})
    assert [layer.window for layer in shape.decoder_layers()] == [0, 0, 0, 32]


def test_mistral_windows_every_layer() -> None:
    shape = ModelShape.from_hf_config(LLAMA | {"model_type": "mistral", "sliding_window": 16})
    assert {layer.window for layer in shape.decoder_layers()} == {16}
    assert ModelShape.from_hf_config(LLAMA | {"model_type": "mistral", "sliding_window": None}).window_size is None


def test_qwen_moe_layers_follow_the_step_and_the_list() -> None:
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    config = LLAMA | experts | {"model_type": "qwen3_moe", "decoder_sparse_step": 2, "mlp_only_layers": [3]}
    assert ModelShape.from_hf_config(config).moe_layer_freq == (0, 1, 0, 0)


def test_qwen3_next_mixes_three_to_one() -> None:
    layers = ModelShape.preset("Qwen3-Next-80B-A3B").decoder_layers()
    assert [layer.mixer for layer in layers[:4]] == ["gated_delta_net"] * 3 + ["attention"]
    assert {layer.mlp for layer in layers} == {"moe"}


def test_deepseek_starts_dense() -> None:
    shape = ModelShape.preset("DeepSeek-V3")
    assert [layer.mlp for layer in shape.decoder_layers()[:4]] == ["dense"] * 3 + ["moe"]
    assert shape.moe_shared_expert_intermediate_size == 2048
    # num_nextn_predict_layers is a choice of the run.
    assert shape.mtp_num_layers == 0


def test_deepseek_v32_is_v3_with_an_indexer() -> None:
    dense, sparse = ModelShape.preset("DeepSeek-V3"), ModelShape.preset("DeepSeek-V3.2")
    assert {layer.mixer for layer in sparse.decoder_layers()} == {"dsa"}
    assert replace(sparse, dsa_indexer_n_heads=0, dsa_indexer_head_dim=0, dsa_indexer_topk=0) == dense
    # Sparse attention pays once a query has many more keys than it picks.
    short, long = ([calculate_fwd_flops([length], shape) for shape in (dense, sparse)] for length in (2048, 131072))
    assert short[1] > short[0]
    assert long[1] < 0.6 * long[0]


def test_nemotron_reads_a_pattern_or_a_list() -> None:
    config = PRESETS["Nemotron-H-8B"]
    names = {"M": "mamba", "-": "mlp", "*": "attention"}
    kinds = [names[symbol] for symbol in config["hybrid_override_pattern"]]
    listed = {key: value for key, value in config.items() if key != "hybrid_override_pattern"}
    assert ModelShape.from_hf_config(listed | {"layers_block_type": kinds}) == ModelShape.preset("Nemotron-H-8B")
    with pytest.raises(BalanceError, match="hybrid_layer_pattern"):
        ModelShape.from_hf_config(listed | {"layers_block_type": [*kinds[:-1], "rwkv"]})
