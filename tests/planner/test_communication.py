"""Communication costs follow from the width of keys and values, and from the link."""

from __future__ import annotations

import doctest

import pytest

from megatron_balance import BalanceError, CostModel, ModelShape
from megatron_balance.cost import communication
from megatron_balance.cost.communication import BETWEEN_NODES, WITHIN_NODE, Link, exchange_bytes_per_token
from megatron_balance.cost.communication import exchange_flops_per_token as exchange


def test_examples() -> None:
    assert doctest.testmod(communication).failed == 0


def test_grouped_queries_send_their_groups_only() -> None:
    shape = ModelShape.preset("Qwen3-8B")  # 36 layers, 8 groups of 128
    assert exchange_bytes_per_token(shape) == 3 * 36 * 2 * 8 * 128 * 2
    assert exchange_bytes_per_token(shape, recompute=True) * 3 == exchange_bytes_per_token(shape) * 4
    assert exchange_bytes_per_token(shape, bytes_per_number=4) == 2 * exchange_bytes_per_token(shape)


def test_beside_the_work_on_a_token() -> None:
    """About 1 % of a token's linear cost within a node, 8 % between nodes: what dynamic context parallelism expects."""
    shape = ModelShape.preset("Qwen3-8B")
    linear = CostModel.from_shape(shape).linear
    assert exchange(shape, link=WITHIN_NODE) / linear == pytest.approx(0.0087, rel=0.02)
    assert exchange(shape, link=BETWEEN_NODES) / linear == pytest.approx(0.078, rel=0.02)


def test_latent_attention_sends_uncompressed_heads() -> None:
    shape = ModelShape.preset("DeepSeek-V3")
    layers = len(shape.decoder_layers()) + len(shape.mtp_layers())
    assert exchange_bytes_per_token(shape) == 3 * layers * 128 * (128 + 64 + 128) * 2


def test_layers_without_a_ring_are_refused() -> None:
    with pytest.raises(BalanceError, match="gated_delta_net"):
        exchange_bytes_per_token(ModelShape.preset("Qwen3-Next-80B-A3B"))


@pytest.mark.parametrize("link", [{"bytes_per_second": 0.0}, {"bytes_per_second": 1.0, "flops_per_second": -1.0}])
def test_a_link_has_speeds(link: dict[str, float]) -> None:
    with pytest.raises(BalanceError, match="above zero"):
        Link(**link)
