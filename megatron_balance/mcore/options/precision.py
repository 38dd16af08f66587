"""Options of precision: number formats, and the token counts that they require."""

from __future__ import annotations

from megatron_balance.mcore.options.conditions import among, both, given, negated
from megatron_balance.mcore.options.option import Option, Support

PRECISION = (
    Option(
        names=("bf16",),
        support=Support.SUPPORTED,
    ),
    Option(
        names=("fp16",),
        also=("loss_scale", "initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis"),
        support=Support.SUPPORTED,
    ),
    *(
        Option(
            names=(precision, recipe),
            also=(f"{precision}_param_gather", "moe_router_padding_for_quantization", "moe_router_padding_for_fp8"),
            case=case,
            support=Support.SUPPORTED,
            when=both(given(precision), negated(among(recipe, "custom"))),
            caution="its kernels need a GPU and are not run by the tests; what they rely on is tested: micro-batches "
            "hold multiples of the tokens that they take",
        )
        for precision, recipe, case in (
            ("fp8", "fp8_recipe", "delayed, tensorwise, mxfp8, blockwise"),
            ("fp4", "fp4_recipe", "nvfp4"),
        )
    ),
    *(
        Option(
            names=(recipe, precision),
            also=(f"{precision}_quantizer_factory",),
            case="custom",
            support=Support.REFUSED,
            when=both(given(precision), among(recipe, "custom")),
            because="the numbers of tokens that its kernels take are not known",
            remedy=f"set {known}",
        )
        for precision, recipe, known in (
            ("fp8", "fp8_recipe", "delayed, tensorwise, mxfp8 or blockwise"),
            ("fp4", "fp4_recipe", "nvfp4"),
        )
    ),
    Option(
        names=("te_precision_config_file", "kitchen_config_file", "kitchen_recipe_number"),
        support=Support.REFUSED,
        when=given("te_precision_config_file", "kitchen_config_file", "kitchen_recipe_number"),
        because="the numbers of tokens that its layers take are not known",
        remedy="set --fp8-recipe or --fp4-recipe in its place",
    ),
)
