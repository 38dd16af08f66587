"""The cost of passing keys on between context-parallel ranks, against the link's speed by hand.

It reads below the public names: the cost model of a run has none, and its effect on a plan is too small to see.
"""

from __future__ import annotations

import pytest

from megatron_balance import ModelShape, Topology
from megatron_balance.mcore.setup.settings import costs_of

SHAPE = ModelShape.preset("Qwen3-8B")
WITHIN, BETWEEN = 0.0087, 0.078
"""Parts of a token's linear cost."""


@pytest.mark.parametrize(
    ("topology", "ranks_of_node", "part"),
    [
        (Topology(8), 8, 0),  # one size for all
        (Topology(8, dynamic_cp=True), 8, WITHIN),
        (Topology(8, dynamic_cp=True), 4, BETWEEN),
        (Topology(16, dynamic_cp=True, max_cp_size=8), 8, WITHIN),  # groups fit a node
        (Topology(8, dynamic_cp=True, max_cp_size=4, tp_size=2), 8, WITHIN),
        (Topology(8, dynamic_cp=True, tp_size=2), 8, BETWEEN),
        (Topology(16, dynamic_cp=True, max_cp_size=4), 6, BETWEEN),  # from rank 4 on, over the end of a node of 6
        (Topology(6, dynamic_cp=True), 6, WITHIN),  # there is one node
    ],
)
def test_groups_within_a_node_exchange_over_its_links(
    monkeypatch: pytest.MonkeyPatch, topology: Topology, ranks_of_node: int, part: float
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks_of_node))
    cost = costs_of({"balance_by_flops": True, "bf16": True}, topology=topology, shape=lambda: SHAPE).model
    assert cost.cp_exchange / cost.linear == pytest.approx(part, rel=0.02)
