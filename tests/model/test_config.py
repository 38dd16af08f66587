"""The reader of config.json, over configurations of transformers' own classes and files that a user may have.

configs.json has a row for each type: the keys that are read, and the weights of transformers' own model.
"""

import json
import re
import warnings
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_balance import BalanceError, ModelShape, calculate_fwd_flops
from megatron_balance.model.flops import fwd_flops_by_part
from megatron_balance.model.hf_config import FAMILIES, PRESETS, ROWS

CONFIGS = json.loads((Path(__file__).parent / "configs.json").read_text(encoding="utf-8"))

LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "vocab_size": 1000,
}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


def read(config):
    """The shape, and the warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        shape = ModelShape.from_hf_config(config)
    return shape, [str(warning.message) for warning in caught]


def num_parameters(shape, *, tied=False):
    """All matrices, from FLOPs: two a weight and token, without states; experts that no token visits as well."""
    parts = fwd_flops_by_part(shape)
    ends = parts.pop("lm_head").linear * (1 if tied else 2)
    mixers = [layer.mixer for layer in shape.layers()]
    keys = shape.linear_num_key_heads * shape.linear_key_head_dim
    values = shape.linear_num_value_heads * shape.linear_value_head_dim
    delta_net = 2 * shape.linear_conv_kernel_dim * (2 * keys + values) + 8 * shape.linear_key_head_dim * values
    scan = 7 * shape.mamba_num_heads * shape.mamba_head_dim * shape.mamba_state_dim
    states = mixers.count("gated_delta_net") * delta_net + mixers.count("mamba") * scan
    experts = sum(flops.expert_linear for flops in parts.values()) * shape.num_experts // max(shape.moe_router_topk, 1)
    return (sum(flops.linear for flops in parts.values()) - states + experts + ends) // 2


@pytest.mark.parametrize("model_type", CONFIGS["read"])
def test_a_known_type_has_the_weights_of_transformers_model(model_type):
    config, parameters = CONFIGS["read"][model_type]
    shape, warned = read(config)
    assert not warned
    # gpt-oss alone has biases of its experts, 0.03 %.
    assert num_parameters(shape) == pytest.approx(parameters, rel=4e-4)


@pytest.mark.parametrize("model_type", CONFIGS["generic"])
def test_an_unknown_type_is_read_by_its_keys_with_a_warning(model_type):
    config, parameters = CONFIGS["generic"][model_type]
    shape, warned = read(config)
    assert f"{model_type!r} is not known" in warned[0]
    assert "hidden_size" in warned[0]
    assert f"passes {calculate_fwd_flops([1], shape) / 2e9:.2f} billion of its weights" in warned[0]
    assert num_parameters(shape) == pytest.approx(parameters, rel=0.01)


@pytest.mark.parametrize("model_type", CONFIGS["refused"])
def test_layers_that_are_not_counted_are_refused_by_name(model_type):
    with pytest.raises(BalanceError, match=f"{model_type}.*balance by tokens"):
        ModelShape.from_hf_config(LLAMA | CONFIGS["refused"][model_type])


@pytest.mark.parametrize(("keys", "message"), CONFIGS["uncounted"])
def test_keys_that_nothing_counts_are_refused_in_an_unknown_type(keys, message):
    with pytest.raises(BalanceError, match=message):
        ModelShape.from_hf_config(LLAMA | keys | {"model_type": "new"})


def test_a_file_or_its_folder_is_read(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    shape = ModelShape.from_hf_config(LLAMA)
    assert ModelShape.from_hf_config(tmp_path) == shape
    assert ModelShape.from_hf_config(str(tmp_path / "config.json")) == shape
    assert (shape.num_query_groups, shape.kv_channels, shape.padded_vocab_size) == (4, 16, 1000)
    for content, message in (("{", r"config\.json cannot be read"), ("[]", "holds an object")):
        (tmp_path / "config.json").write_text(content)
        with pytest.raises(BalanceError, match=message):
            ModelShape.from_hf_config(tmp_path)
    with pytest.raises(BalanceError, match=r"nowhere\.json cannot be read"):
        ModelShape.from_hf_config(tmp_path / "nowhere.json")


def test_a_missing_or_absurd_value_is_named():
    with pytest.raises(BalanceError, match=r"vocab_size is missing.*'llama'"):
        ModelShape.from_hf_config({key: value for key, value in LLAMA.items() if key != "vocab_size"})
    with pytest.raises(BalanceError, match="num_hidden_layers is missing"):
        ModelShape.from_hf_config({})
    with pytest.raises(BalanceError, match="value of a wrong kind"):
        ModelShape.from_hf_config(LLAMA | {"num_attention_heads": "four"})
    # Fault: checks of integers depended on how annotations are evaluated.
    with pytest.raises(BalanceError, match=r"VisionEncoder\.hidden_size is 8\.5"):
        replace(ModelShape.preset("Qwen3-VL-8B").vision, hidden_size=8.5)


def test_a_tower_that_is_not_counted_is_said():
    for name in ("text_config", "llm_config"):
        shape, warned = read({"model_type": "gemma3", "vision_config": {"depth": 1}, name: PRESETS["gemma-3-12b"]})
        assert shape == ModelShape.preset("gemma-3-12b")
        assert "vision or audio tower of model_type 'gemma3' is not counted" in warned[0]


def test_the_encoder_of_qwen3_5_is_that_of_qwen3_vl():
    shape, warned = read(PRESETS["Qwen3-VL-8B"] | {"model_type": "qwen3_5_moe"})
    assert not warned
    assert shape.vision == ModelShape.preset("Qwen3-VL-8B").vision


# What older published files leave out, or say in another way ----------------------------------------


def test_windows_follow_a_list_a_period_or_the_family():
    def windows(**keys):
        return [layer.window for layer in ModelShape.from_hf_config(LLAMA | {"sliding_window": 16} | keys).layers()]

    assert windows(model_type="mistral") == [16] * 4
    assert windows(model_type="mistral", sliding_window=None) == [0] * 4
    assert windows(model_type="gpt_oss", **EXPERTS) == [16, 0, 16, 0]
    assert windows(model_type="qwen2", max_window_layers=3) == [0] * 4
    with pytest.raises(BalanceError, match="a sliding_window without layer_types"):
        windows(model_type="qwen2", max_window_layers=3, use_sliding_window=True)
    assert windows(model_type="exaone4", sliding_window_pattern="LLG") == [16, 16, 0, 16]
    assert windows(model_type="cohere2") == [16, 16, 16, 0]
    layers = ["sliding_attention"] * 3 + ["full_attention"]
    assert windows(model_type="olmo3", layer_types=layers) == [16, 16, 16, 0]


def test_gemma3_leaves_its_heads_to_its_class():
    # google/gemma-3-4b-it
    small = {"model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34}
    shape = ModelShape.from_hf_config(small | {"sliding_window": 1024})
    assert (shape.num_attention_heads, shape.num_query_groups, shape.kv_channels) == (8, 4, 256)
    assert [layer.window for layer in shape.layers()[:7]] == [1024] * 5 + [0, 1024]


@pytest.mark.parametrize(("keys", "freq"), CONFIGS["moe_layer_freq"])
def test_experts_are_in_the_layers_that_the_file_says(keys, freq):
    shape = ModelShape.from_hf_config(LLAMA | EXPERTS | keys | {"model_type": "qwen3_moe"})
    assert shape.moe_layer_freq == tuple(freq)


def test_shared_experts_have_a_width_or_a_number():
    def shared(**keys):
        shape = ModelShape.from_hf_config(LLAMA | EXPERTS | keys | {"model_type": "glm4_moe"})
        return shape.moe_shared_expert_intermediate_size

    assert (shared(), shared(n_shared_experts=2), shared(shared_expert_intermediate_size=48)) == (0, 64, 48)


def test_nemotron_reads_a_pattern_or_a_list():
    config = PRESETS["Nemotron-H-8B"]
    names = {"M": "mamba", "-": "mlp", "*": "attention"}
    kinds = [names[symbol] for symbol in config["hybrid_override_pattern"]]
    listed = {key: value for key, value in config.items() if key != "hybrid_override_pattern"}
    assert ModelShape.from_hf_config(listed | {"layers_block_type": kinds}) == ModelShape.preset("Nemotron-H-8B")
    with pytest.raises(BalanceError, match="hybrid_layer_pattern"):
        ModelShape.from_hf_config(listed | {"layers_block_type": [*kinds[:-1], "rwkv"]})


# Presets ----------------------------------------


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_has_the_published_number_of_parameters(name):
    row = ROWS[name]
    counted = num_parameters(ModelShape.preset(name), tied=row["config"].get("tie_word_embeddings", False))
    # Kimi-K2's paper says 1.04 T; its config.json gives 1.026 T, and 1.04 T were its dense layer one of experts.
    assert counted == pytest.approx(row["parameters"], rel=0.014 if name == "Kimi-K2" else 0.01)


# docs/models.md, which says what is read, refused and preset -----------------------------------------

PAGE = (Path(__file__).parent.parent.parent / "docs" / "models.md").read_text(encoding="utf-8")


def names(after, before):
    return re.findall(r"`([^`]+)`", PAGE.split(after)[1].split(before)[0])


def rows(heading):
    table = PAGE.split(heading)[1].split("\n\n")[0]
    return [
        [cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines() if line.startswith("| ")
    ]


def test_known_and_refused_types_are_those_of_the_reader():
    assert names("configs.json`).", "Another type") == sorted(FAMILIES)
    for refused in names("record.", "So is any file"):
        with pytest.raises(BalanceError, match="FLOPs are not known"):
            ModelShape.from_hf_config({**PRESETS["Qwen3-8B"], "model_type": refused})
    for key in names("one of these keys:", "## Presets"):
        with pytest.raises(BalanceError, match="FLOPs are not known"):
            ModelShape.from_hf_config({**PRESETS["Qwen3-8B"], "model_type": "new", key: 1})


def test_presets_are_those_of_the_package():
    for (name, read, published, source), (expected, row) in zip(rows("\n| preset"), ROWS.items(), strict=True):
        tied = row["config"].get("tie_word_embeddings", False)
        assert (name, source) == (expected, row["source"])
        assert read == f"{num_parameters(ModelShape.preset(name), tied=tied) / 1e9:.2f}"
        assert published == f"{row['parameters'] / 1e9:.2f}, {row['published']}"
