"""What would be wrong in silence for a model family ends the run on every rank, before its first step."""

from __future__ import annotations

import pytest
from kept_runs import KeptRuns
from table import BY_FLOPS, FAMILY_ROWS, KERNELS


@pytest.mark.parametrize(
    ("family", "fault", "message"),
    [
        ("Nemotron-3-Nano", "families:sequences_not_told_apart", "PackedSeqParams.seq_idx is none"),
        ("Qwen3-VL", "families:positions_cut_short", "position_ids has shape [1, 3, "),
    ],
)
@pytest.mark.xdist_group("DP2")
def test_a_fault_ends_every_rank(train: KeptRuns, family: str, fault: str, message: str) -> None:
    row = next(row for row in FAMILY_ROWS if row.model == family)
    failed = train(
        f"{row.stock} {BY_FLOPS}", stand_ins=(*row.stand_ins, (fault, {})), leave_out=row.without, fails=True
    )
    for of_rank in failed.rows:
        assert [event["kind"] for event in of_rank] == ["error"]
        assert message in of_rank[0]["text"]


def test_mamba_layers_without_balancing_are_left_as_they_are(train: KeptRuns) -> None:
    row = next(row for row in FAMILY_ROWS if row.model == "Nemotron-3-Nano")
    leaking = train(row.stock, stand_ins=(*KERNELS, ("families:sequences_not_told_apart", {})), leave_out=row.without)
    assert len(leaking.steps) == 3
