"""record_steps, its micro-batches aligned as FP8 or FP4 would have them: a CPU has no such layers.

ALIGNED_FOR holds Megatron's settings of the precision, as JSON. The alignment is derived from them; the model computes
as the run's flags say.
"""

from __future__ import annotations

import json
import os
from types import SimpleNamespace

import record_steps

from megatron_balance.mcore.setup import arguments


def main() -> None:
    """Train."""
    derive, settings = arguments.token_alignment, json.loads(os.environ["ALIGNED_FOR"])
    arguments.token_alignment = lambda args: derive(SimpleNamespace(**vars(args) | settings))
    record_steps.main()
