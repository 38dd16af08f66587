"""The loop: which batches come, and what is kept so that a run can go on."""

from __future__ import annotations

from megatron_balance.mcore.options.conditions import above, both, given
from megatron_balance.mcore.options.option import Option, Support

_LOOKAHEAD = above("balance_lookahead", 1)

TRAINING_LOOP = (
    *(
        Option(
            names=(name, "balance_lookahead"),
            case="with --balance-lookahead above 1",
            support=Support.REFUSED,
            when=both(given(name), _LOOKAHEAD),
            because="look-ahead chooses among global batches of one size",
            remedy="set --balance-lookahead 1 until the batch has grown",
        )
        for name in ("rampup_batch_size", "step_batch_size_schedule")
    ),
    Option(
        names=("non_persistent_save_interval", "balance_lookahead"),
        case="with --balance-lookahead above 1",
        support=Support.REFUSED,
        when=both(given("non_persistent_save_interval"), _LOOKAHEAD),
        because="samples that wait go with persistent checkpoints alone; a run resumed from another would skip them",
        remedy="use --save-interval, or set --balance-lookahead 1",
    ),
    Option(
        names=("dataloader_save",),
        case="of scripts with loaders that save a state",
        support=Support.REFUSED,
        when=given("dataloader_save"),
        because="balancing pulls the next step's items ahead, which the loader's own state would count as trained, and "
        "a resumed run would skip them",
        remedy="drop it, or the balance flags",
    ),
)
