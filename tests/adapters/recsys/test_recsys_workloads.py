"""FLOPs of a layer, against counts by hand; needs torch and no torchrec."""

import numpy as np
import pytest
import torch

from megatron_balance.adapters.recsys.workloads import layer_cost, workloads
from megatron_balance.errors import BalanceError

OUTPUT_ROW = 6
"""FLOPs of the output layer of one row, a channel: the shape of a model has one at least."""


@pytest.mark.parametrize(
    ("model", "weights"),
    [
        pytest.param("hstu", 4 + 1, id="QKVU and output (R25)"),
        pytest.param("sid_gr", 3 + 1 + 4 + 4, id="QKV, output, MLP (R25)"),
    ],
)
def test_r19_a_layer_by_hand(model, weights):
    num_heads, head_dim, tokens = 4, 256, 100
    width = num_heads * head_dim
    gemms = 3 * 2 * weights * width * width * tokens + OUTPUT_ROW * width * tokens
    # Two products a head, of which the causal half; forward 2 of them, backward 5.
    attention = (2 + 5) * num_heads * head_dim * tokens * tokens
    assert layer_cost(model, num_heads=num_heads, head_dim=head_dim)(tokens) == gemms + attention


@pytest.mark.parametrize("num_heads", [1, 2, 8])
def test_attention_costs_the_same_however_it_is_cut_into_heads(num_heads):
    assert layer_cost("hstu", num_heads=num_heads, head_dim=512 // num_heads) == layer_cost(
        "hstu", num_heads=1, head_dim=512
    )


@pytest.mark.parametrize("make", [lambda values: torch.tensor(values, dtype=torch.int32), np.int32])
def test_int32_lengths_do_not_wrap(make):
    cost_model = layer_cost("hstu", num_heads=4, head_dim=256)
    costs = workloads(make([4096, 8192]), cost_model=cost_model)
    assert costs.tolist() == [cost_model(4096), cost_model(8192)]
    assert workloads(4096, cost_model=cost_model) == cost_model(4096)
    assert workloads(make([2048]), cost_model=cost_model, tokens_per_entry=2).tolist() == [cost_model(4096)]


def test_an_unknown_model_is_named():
    with pytest.raises(BalanceError, match="model is 'bert': it must be one of hstu, sid_gr"):
        layer_cost("bert", num_heads=1, head_dim=1)
