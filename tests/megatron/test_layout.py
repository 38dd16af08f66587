"""The layers of every chunk of a pipeline, against those that Megatron builds."""

import shlex
from itertools import product

import numpy as np
import pytest
import torch
from megatron.core import parallel_state
from megatron.core.models.hybrid import hybrid_layer_allocation
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.multi_token_prediction import get_mtp_num_layers_to_build
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from megatron_balance import ModelShape
from megatron_balance.cost.rates import split_advice
from megatron_balance.model.layout import PipelineLayout

SIZES = {"hidden_size": 8, "num_attention_heads": 2}


@pytest.fixture(autouse=True)
def rank():
    yield
    for change in (
        parallel_state.set_pipeline_model_parallel_rank,
        parallel_state.set_pipeline_model_parallel_world_size,
        parallel_state.set_virtual_pipeline_model_parallel_world_size,
    ):
        change(None)


def megatrons(config):
    """First layer, layers and MTP layers of each chunk, in the order in which micro-batches pass them."""
    stages, chunks = config.pipeline_model_parallel_size, config.virtual_pipeline_model_parallel_size
    parallel_state.set_pipeline_model_parallel_world_size(stages)
    parallel_state.set_virtual_pipeline_model_parallel_world_size(chunks)
    result = []
    for chunk, stage in product(range(chunks or 1), range(stages)):
        parallel_state.set_pipeline_model_parallel_rank(stage)
        where = {"vp_stage": chunk if chunks else None}
        first = get_transformer_layer_offset(config, pp_rank=stage, **where)
        layers = get_num_layers_to_build(config, pp_rank=stage, **where)
        result.append((first, layers, get_mtp_num_layers_to_build(config, **where)))
    return result


def ours(layout, shape):
    first, result = 0, list[tuple[int, int, int]]()
    for layers, chunk in zip(layout.num_layers, layout.chunks(shape), strict=True):
        assert len(chunk.layers) == layers + chunk.mtp_projections
        result.append((first, layers, chunk.mtp_projections))
        first += layers
    return result


def shape_of(num_layers, **sizes):
    return ModelShape(
        **{"num_layers": num_layers, "num_query_groups": 2, "kv_channels": 4, "ffn_hidden_size": 8, **SIZES, **sizes},
        padded_vocab_size=16,
        gated_linear_unit=False,
    )


def compare(num_layers, pp_size, vpp_size, mtp, **options):
    """Whether Megatron accepts the options; if so, both build the same."""
    shape = shape_of(num_layers, mtp_num_layers=mtp or 0)
    sizes = {"pipeline_model_parallel_size": pp_size, "virtual_pipeline_model_parallel_size": vpp_size}
    try:
        config = TransformerConfig(
            **SIZES, num_layers=num_layers, mtp_num_layers=mtp, pipeline_dtype=torch.float32, **sizes, **options
        )
        theirs = megatrons(config)
    except (ArithmeticError, AssertionError, ValueError):  # two stages, both counted: Megatron divides by zero
        return False
    if min(layers for _, layers, _ in theirs) < 0:  # its configuration takes more layers at the ends than there are
        return False
    flags = {
        name.replace("num_layers_in_first_pipeline_stage", "decoder_first_pipeline_num_layers").replace(
            "num_layers_in_last_pipeline_stage", "decoder_last_pipeline_num_layers"
        ): value
        for name, value in options.items()
    }
    for given in (sizes | flags, vars(config)):  # arguments, and a configuration
        layout = PipelineLayout.from_options(given, shape=shape)
        assert layout is not None
        assert ours(layout, shape) == theirs
    return True


def test_counts_of_layers_are_split_as_megatron_splits_them():
    accepted = 0
    for num_layers, pp_size, vpp_size, mtp in product(range(2, 25), (2, 3, 4, 8), (None, 2, 3), (None, 2)):
        for first, last in product((None, 1, 2, 4), repeat=2):
            ends = {"num_layers_in_first_pipeline_stage": first, "num_layers_in_last_pipeline_stage": last}
            accepted += compare(num_layers, pp_size, vpp_size, mtp, **ends)
        for embedding, loss in ((True, False), (False, True), (True, True)):
            ends = {"account_for_embedding_in_pipeline_split": embedding, "account_for_loss_in_pipeline_split": loss}
            accepted += compare(num_layers, pp_size, vpp_size, mtp, **ends)
    assert accepted > 500


@pytest.mark.parametrize(
    ("layout", "num_layers", "pp_size", "vpp_size", "mtp"),
    [
        ("Et*3|(tt|)*2,tmL", 8, 4, None, 1),
        ("Et|t*2|ttt|L", 6, 2, 2, None),
        ("E|(t|)*5,t|tL", 7, 4, 2, None),
        ("Ett|(ttt|)*2,mm|L", 8, 5, None, 2),
        ([["embedding", "decoder"], ["decoder"] * 2, ["decoder"], ["mtp", "loss"]], 4, 2, 2, 1),
    ],
)
def test_a_layout_is_read_as_megatron_reads_it(layout, num_layers, pp_size, vpp_size, mtp):
    assert compare(num_layers, pp_size, vpp_size, mtp, pipeline_model_parallel_layout=layout)


@pytest.mark.parametrize(
    ("pattern", "pp_size", "vpp_size", "ends"),
    [
        ("M-*-|MM|*|M*M-", 4, None, (None, None)),
        ("M-*-|MM|*|M*M-/MM", 2, 2, (None, None)),
        ("M-*-MM*M", 4, None, (None, None)),
        ("M-*-MM*M/MM", 3, None, (1, 3)),
        ("M-*-MM*", 3, None, (None, 3)),
    ],
)
def test_a_hybrid_pattern_is_cut_as_megatron_cuts_it(pattern, pp_size, vpp_size, ends, monkeypatch):
    main, *depths = pattern.split("/")
    sizes = {"mamba_state_dim": 1, "mamba_head_dim": 1, "mamba_num_groups": 1, "mamba_num_heads": 1}
    num_layers = len(main.replace("|", ""))
    shape = shape_of(num_layers, hybrid_layer_pattern=pattern, mtp_num_layers=len(depths), **sizes)
    monkeypatch.setattr(hybrid_layer_allocation, "log_on_each_pipeline_stage", lambda *_, **__: None)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda _: pp_size)
    theirs = []
    group = object()
    for chunk, stage in product(range(vpp_size or 1), range(pp_size)):
        monkeypatch.setattr(torch.distributed, "get_rank", lambda _=None, stage=stage: stage)
        vp_stage = chunk if vpp_size else None
        layers, first = hybrid_layer_allocation.select_pipeline_segment(main, group, vp_stage, *ends)
        theirs.append((first, len(layers)))
    options = {
        "pipeline_model_parallel_size": pp_size,
        "virtual_pipeline_model_parallel_size": vpp_size,
        "decoder_first_pipeline_num_layers": ends[0],
        "decoder_last_pipeline_num_layers": ends[1],
    }
    layout = PipelineLayout.from_options(options, shape=shape)
    assert layout is not None
    assert [(sum(layout.num_layers[:chunk]), layers) for chunk, layers in enumerate(layout.num_layers)] == theirs


@pytest.mark.parametrize(
    ("name", "pp_size", "vpp_size", "largest", "advice"),
    [
        ("Qwen3-8B", 4, 1, 1.24, "'Et*10|t*10|t*10|t*6L' makes that 1.02"),
        ("Qwen3-8B", 8, 1, 1.45, "|t*5|t*1L' makes that 1.02"),  # 4.5 layers would be 1.55
        ("Llama-3.1-8B", 4, 2, 1.20, "'Et*5|t*5|t*4|t*4|t*4|t*4|t*4|t*2L' makes that 1.05"),
        ("Qwen3-30B-A3B", 8, 1, 1.62, "'Et*7|t*7|t*7|t*7|t*6|t*6|t*6|t*2L' makes that 1.06"),
        ("Llama-3.1-8B", 8, 2, 1.47, "'Et*3|t*3|"),
    ],
)
def test_another_split_is_advised_where_megatron_takes_it(name, pp_size, vpp_size, largest, advice):
    shape = ModelShape.preset(name)
    layout = PipelineLayout.even_split(shape.num_layers, pp_size=pp_size, vpp_size=vpp_size)
    sentence = split_advice(layout, shape=shape, lengths=np.full(8192, 2048))
    assert f"stage {pp_size} of {pp_size} computes {largest:.2f} times the mean" in sentence
    assert advice in sentence
    for flag, split in layout.alternatives(shape).items():
        name, text = shlex.split(flag)
        assert name == "--pipeline-model-parallel-layout"
        options = {"pipeline_model_parallel_layout": text}
        assert compare(shape.num_layers, pp_size, vpp_size if vpp_size > 1 else None, None, **options), flag
        sizes = {"pipeline_model_parallel_size": pp_size, "virtual_pipeline_model_parallel_size": vpp_size}
        assert PipelineLayout.from_options(sizes | options, shape=shape) == split
