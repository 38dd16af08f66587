"""Options of attention and layers: their support for packed sequences."""

from __future__ import annotations

from megatron_balance.mcore.options.conditions import above, among, both, either, engine_before, given, negated
from megatron_balance.mcore.options.option import Option, Support

ATTENTION = (
    Option(
        names=("attention_backend",),
        case="unfused or local",
        support=Support.REFUSED,
        when=among("attention_backend", "unfused", "local"),
        because="it does not take packed sequences",
        remedy="set auto, flash or fused",
    ),
    Option(
        names=("transformer_impl",),
        also=("spec",),
        case="local, without --spec",
        support=Support.REFUSED,
        when=both(among("transformer_impl", "local"), negated(given("spec"))),
        because="Megatron's own local attention does not take packed sequences",
        remedy="set --transformer-impl transformer_engine, or name layers that take them with --spec",
    ),
    Option(
        names=("transformer_impl",),
        case="transformer_engine, of a release before 2.3",
        support=Support.REFUSED,
        when=engine_before(2, 3),
        because="its attention does not take all that Megatron passes with packed sequences",
        remedy="install transformer-engine 2.3 or newer",
    ),
    Option(
        names=("transformer_impl",),
        case="transformer_engine, of a release from 2.3 to 2.8",
        support=Support.SUPPORTED,
        when=both(engine_before(2, 9), negated(engine_before(2, 3))),
        # transformer_config.py of Megatron's dev branch (August 2026), on sequence_packing_scheduler
        caution="Megatron's developers report that packed sequences may converge badly with Transformer Engine before "
        "2.9: install a newer one where you can",
    ),
    Option(
        names=("qk_clip", "log_max_attention_logit"),
        also=("qk_clip_alpha", "qk_clip_threshold"),
        support=Support.REFUSED,
        when=given("qk_clip", "log_max_attention_logit"),
        because="Transformer Engine gives largest logits of packed sequences in new releases alone, and no test here "
        "runs it",
        remedy="drop it",
    ),
    Option(
        names=("attention_dropout", "hidden_dropout"),
        case="above 0",
        support=Support.SUPPORTED,
        when=either(above("attention_dropout", 0), above("hidden_dropout", 0)),
        caution="random numbers depend on a token's place in a micro-batch, so losses are those of another draw",
    ),
    Option(
        names=("position_embedding_type",),
        also=("relative_attention_num_buckets", "relative_attention_max_distance"),
        case="relative",
        support=Support.REFUSED,
        when=among("position_embedding_type", "relative"),
        because="packed sequences take no bias of attention",
        remedy="set rope",
    ),
    Option(
        names=("position_embedding_type",),
        case="rope or learned_absolute",
        support=Support.SUPPORTED,
    ),
    Option(
        names=("use_kitchen_attention",),
        also=("kitchen_attention_backend",),
        support=Support.REFUSED,
        when=given("use_kitchen_attention"),
        because="no test here runs it",
        remedy="drop it",
    ),
    Option(
        names=("multi_latent_attention",),
        support=Support.SUPPORTED,
    ),
    Option(
        names=("mtp_standalone",),
        support=Support.REFUSED,
        when=given("mtp_standalone"),
        because="no test here reads data on that stage",
        remedy="drop it, so that multi-token prediction is on the last stage",
    ),
    Option(
        names=("mtp_num_layers",),
        support=Support.SUPPORTED,
        when=given("mtp_num_layers"),
        caution="where the first tokens of sequences are learned, Megatron weighs the loss of multi-token prediction "
        "by micro-batch, so any regrouping changes it a little, by one over the tokens of a sequence at most",
    ),
    Option(
        names=("use_legacy_models",),
        support=Support.REFUSED,
        when=given("use_legacy_models"),
        because="they do not take packed sequences",
        remedy="drop it",
        last=(0, 17),
    ),
)
