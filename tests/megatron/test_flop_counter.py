"""Our FLOPs against torch's own count of what a real GPTModel computes.

torch's FlopCounterMode sees every GEMM and every attention kernel of a forward pass. It counts attention kernels in
full, `4nd*L²`, whatever their mask; ours counts the causal half. So of `a*L + b*L²`, solved from two lengths,
`a` is our linear part and `b` twice our quadratic one.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from small_shapes import LENGTHS, SHAPES

from megatron_balance.model.flops import fwd_flops

pytest.importorskip("megatron.core")

SCRIPT = Path(__file__).with_name("layer_runs.py")
UNMASKED = 2
"""Of a causal kernel torch counts both halves."""


@pytest.fixture(scope="module")
def counted() -> dict[str, list[int]]:
    done = subprocess.run([sys.executable, SCRIPT, "count-flops"], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", SHAPES)
def test_torch_counts_the_same(counted: dict[str, list[int]], name: str) -> None:
    (short, of_short), (long, of_long) = zip(LENGTHS, counted[name], strict=True)
    quadratic = (of_long / long - of_short / short) / (long - short)
    linear = of_short / short - quadratic * short
    ours = fwd_flops(SHAPES[name])
    # All of it are GEMMs and attention, so the counts are equal; 1 % is what is promised.
    assert linear == pytest.approx(ours.linear + ours.expert_linear, rel=1e-9)
    assert quadratic == pytest.approx(UNMASKED * ours.quadratic, rel=1e-9)
