"""Small models whose kept bytes saved_bytes.py counts and the test compares."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from small_shapes import DENSE, EXPERTS, LATENT

MEASURED = {
    "dense": DENSE,
    "gqa": replace(DENSE, num_query_groups=2, gated_linear_unit=False),
    "deep": replace(DENSE, num_layers=6, num_query_groups=2),
    "moe": replace(DENSE, num_query_groups=2, **EXPERTS),
    "mla": replace(DENSE, **LATENT | {"v_head_dim": 12}),
    "mtp": replace(DENSE, mtp_num_layers=1),
}
RECOMPUTES: dict[str, dict[str, Any]] = {
    "none": {},
    "selective": {"recompute_granularity": "selective", "recompute_modules": ["mlp"]},
    "full": {"recompute": True},
}
TOKENS = (256, 512)
