"""record_steps, its layers of multi-token prediction with an attention that takes packed sequences on a CPU.

From 0.19 Megatron makes the specs of these layers itself, whatever `--spec` says, and its local attention refuses
packed sequences; Transformer Engine's takes them.
"""

from __future__ import annotations

from typing import Any

import record_steps
from megatron.training.models import gpt

from megatron_balance.mcore.thd.attention import thd_layer_spec


def main() -> None:
    """Train."""
    specs = gpt.get_gpt_decoder_layer_specs

    def of_packed_sequences(*positional: Any, **keywords: Any) -> list[Any]:
        return [thd_layer_spec(spec) for spec in specs(*positional, **keywords)]

    gpt.get_gpt_decoder_layer_specs = of_packed_sequences  # type: ignore[assignment]
    record_steps.main()
