"""R11, R13, R14: the work of a row is the model's, in int64, whatever form verl gives lengths in."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from megatron_balance import BalanceError, CostModel, ModelShape
from megatron_balance.adapters.verl.workload import choose_workload, tensor_workloads, workloads

VERLS = CostModel(linear=24576, quadratic=1)
QWEN = {
    "model_type": "qwen2",
    "hidden_size": 896,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "intermediate_size": 4864,
    "vocab_size": 151936,
}


def test_verls_own_formula_is_the_default():
    assert choose_workload() == VERLS
    assert workloads(np.array([0, 1, 1000]), cost_model=VERLS).tolist() == [0, 24577, 24_576_000 + 1_000_000]


@pytest.mark.parametrize(
    "seqlens",
    [
        [3, 70_000],
        torch.tensor([3, 70_000], dtype=torch.int32),
        torch.tensor([3.0, 70_000.0]),
        torch.nested.as_nested_tensor([torch.zeros(3), torch.zeros(70_000)], layout=torch.jagged),
        torch.nested.as_nested_tensor([torch.zeros(3), torch.zeros(70_000)], layout=torch.strided),
    ],
    ids=["list", "int32", "float32", "jagged", "strided"],
)
def test_every_form_of_lengths_gives_exact_int64(seqlens):
    # 70,000 squared leaves int32, and 70,000² + 24576·70,000 is not a float32.
    found = tensor_workloads(seqlens, cost_model=VERLS)
    assert found.dtype == torch.int64
    assert found.tolist() == [3 * 24576 + 9, 70_000 * 24576 + 70_000**2]


def test_the_shape_of_lengths_is_kept():
    assert tensor_workloads(torch.ones(2, 3, dtype=torch.int64), cost_model=VERLS).shape == (2, 3)


@pytest.mark.parametrize(("name", "factor"), [("Qwen2.5-0.5B", 19689), ("Qwen3-8B", 43992), ("Qwen2.5-72B", 93460)])
def test_the_factor_is_the_models(name, factor):
    cost_model = choose_workload(name)
    assert round(cost_model.linear / cost_model.quadratic) == factor
    length = 5000
    exact = length**2 + length * cost_model.linear / cost_model.quadratic
    assert workloads(np.array([length]), cost_model=cost_model)[0] == pytest.approx(exact, abs=1)


def test_a_verl_hf_config_names_the_model():
    hf_config = SimpleNamespace(to_dict=lambda: QWEN)
    assert choose_workload(hf_config) == choose_workload(QWEN) == choose_workload(ModelShape.from_hf_config(QWEN))
    assert choose_workload(QWEN).linear / choose_workload(QWEN).quadratic == pytest.approx(19689, abs=1)


def test_a_factor_is_taken_from_the_model_config():
    assert choose_workload({"mlp_workload_factor": 33024}) == CostModel(linear=33024, quadratic=1)
    with pytest.raises(BalanceError, match="mlp_workload_factor is -1"):
        choose_workload({"mlp_workload_factor": -1})


def test_tokens_are_a_cost_too():
    assert workloads(np.array([7, 9]), cost_model=choose_workload(cost="tokens")).tolist() == [7, 9]


def test_workloads_of_two_calls_can_be_added():
    # Every call has the same unit, whatever else it holds.
    cost_model = choose_workload("Qwen2.5-72B")
    alone = workloads(np.array([1000]), cost_model=cost_model)[0]
    assert workloads(np.array([1000, 1_000_000]), cost_model=cost_model)[0] == alone


def test_an_unknown_model_is_named():
    with pytest.raises(BalanceError, match="the model is a int"):
        choose_workload(7)
