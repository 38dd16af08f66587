"""The byte model against what torch keeps of a real GPTModel and its loss, as micro-batches grow.

The layers are Megatron's local ones in fp32 (`Precision.fused` off); what Transformer Engine's kernels keep on a GPU is
not measured here. The slope between two lengths is bytes a token; what does not grow with tokens is not modelled.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from memory_shapes import MEASURED, RECOMPUTES, TOKENS

from megatron_balance.memory.model import INPUT_BYTES, TrainingMemory, memory_model
from megatron_balance.memory.precision import Precision
from megatron_balance.topology import Topology

pytest.importorskip("megatron.core")

SCRIPT = Path(__file__).with_name("saved_bytes.py")
CLOSE = {"none": 0.01, "selective": 0.01, "full": 0.05}
"""Largest relative difference. Full recomputation keeps so little that the rotary angles (4d, not modelled) show."""


@pytest.fixture(scope="module")
def counted() -> dict[str, dict[str, list[int]]]:
    done = subprocess.run([sys.executable, SCRIPT], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("recompute", RECOMPUTES)
@pytest.mark.parametrize("name", MEASURED)
def test_a_token_takes_what_the_model_says(counted: dict[str, dict[str, list[int]]], name: str, recompute: str) -> None:
    fewer, more = counted[name][recompute]
    measured = (more - fewer) / (TOKENS[1] - TOKENS[0])
    training = TrainingMemory(
        precision=replace(Precision.fp32(), fused=False, qk_layernorm=False),
        untied_embeddings=False,
        recompute_granularity=None if recompute == "none" else recompute,
        recompute_modules=frozenset({"mlp"}),
    )
    (stage,) = memory_model(MEASURED[name], topology=Topology(1), training=training).stages
    ours = stage.layer_bytes_per_token + stage.logits_bytes_per_token - INPUT_BYTES
    assert ours == pytest.approx(measured, rel=CLOSE[recompute])
