"""`--balance-unpad`, which takes padded rows as samples of their true length."""

from __future__ import annotations

from megatron_balance.mcore.options.conditions import above, both, given, unpads
from megatron_balance.mcore.options.option import Option, Support

_WITH = "with --balance-unpad"


PADDED_ROWS = (
    Option(
        names=("balance_unpad",),
        also=("create_attention_mask_in_dataloader",),
        case="without --no-create-attention-mask-in-dataloader",
        support=Support.REFUSED,
        when=both(unpads, given("create_attention_mask_in_dataloader")),
        because="Megatron's scripts would ask for a mask of every micro-batch, and packs have none",
        remedy="add --no-create-attention-mask-in-dataloader",
    ),
    Option(
        names=("context_parallel_size", "balance_unpad"),
        case=f"above 1, {_WITH}",
        support=Support.REFUSED,
        when=both(unpads, above("context_parallel_size", 1)),
        because="scripts for padded rows split a whole row over context-parallel ranks, and a pack is split sample by "
        "sample",
        remedy="set --context-parallel-size 1, or give packed rows",
    ),
    Option(
        names=("moe_aux_loss_coeff", "moe_z_loss_coeff", "moe_router_enable_expert_bias", "balance_unpad"),
        case=_WITH,
        support=Support.SUPPORTED,
        when=both(
            unpads,
            given("num_experts"),
            given("moe_aux_loss_coeff", "moe_z_loss_coeff", "moe_router_enable_expert_bias"),
        ),
        caution="routers of padded rows count padding, those of packs do not, so that these terms differ from a run "
        "without --balance-unpad",
    ),
)
