"""Builds the GPT model that Megatron's flags describe, for releases whose `pretrain()` takes a model provider.

From 0.19 `pretrain()` builds the model from a GPTModelConfig; 0.17 and 0.18 call a provider, which is in their
scripts and not in the wheel.
"""

from __future__ import annotations

import inspect
from typing import Any

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_mtp_block_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.spec_utils import import_module
from megatron.training import get_args
from megatron.training.arguments import core_transformer_config_from_args


def model_provider(
    pre_process: bool = True,
    post_process: bool = True,
    vp_stage: int | None = None,
    config: Any = None,
    pg_collection: Any = None,
) -> GPTModel:
    """A GPT model, or its part on this pipeline stage.

    Args:
        pre_process: with the embedding.
        post_process: with the output projection.
        vp_stage: the model chunk under a virtual pipeline.
        config: a TransformerConfig; made from Megatron's arguments by default.
        pg_collection: process groups; Megatron's own by default.
    """
    args: Any = get_args()
    if config is None:
        config = core_transformer_config_from_args(args)
    layers = _layers(args, config=config, vp_stage=vp_stage)
    mtp_block: Any = None
    if args.mtp_num_layers:
        use_te = args.transformer_impl == "transformer_engine"
        mtp_block = get_gpt_mtp_block_spec(config, layers, use_transformer_engine=use_te, vp_stage=vp_stage)
    return GPTModel(
        config=config,
        transformer_layer_spec=layers,
        mtp_block_spec=mtp_block,
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        fp16_lm_cross_entropy=args.fp16_lm_cross_entropy,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        rotary_percent=args.rotary_percent,
        rotary_base=args.rotary_base,
        rope_scaling=args.use_rope_scaling,
        vp_stage=vp_stage,
        pg_collection=pg_collection,
    )


def _layers(args: Any, *, config: Any, vp_stage: int | None) -> Any:
    """The layers of `--spec`: a function of the configuration, as 0.19 takes it, or a spec; by default Megatron's."""
    if args.spec is None:
        return get_gpt_decoder_block_spec(
            config,
            use_transformer_engine=args.transformer_impl == "transformer_engine",
            normalization=args.normalization,
            vp_stage=vp_stage,
        )
    named = import_module(args.spec)
    return named(config, vp_stage=vp_stage) if inspect.isfunction(named) else named
