"""Attention over trees, against a dense mask: outputs and all gradients."""

import numpy as np
import pytest
import torch
from test_prefix_packing import common, random_rows, seen_by
from torch.nn.attention import flex_attention

from megatron_balance.mcore import tree_attention as attention
from megatron_balance.samples.prefix_packing import PrefixTree


@pytest.fixture(params=["node", "block"])
def attention_over(request, monkeypatch):
    """That of CPUs, and that of GPUs: FlexAttention as torch runs it where it is not compiled."""
    if request.param == "node":
        return lambda tree: attention.attention_over(tree, device=torch.device("cpu"))
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *_: None)  # it refuses gradients on CPUs
    monkeypatch.setattr(attention, "_compiled", lambda function: function)
    return lambda tree: attention.attention_by_block(torch.from_numpy(tree.ends))


@pytest.mark.filterwarnings("ignore:flex_attention called without", "ignore:The .grad attribute")
@pytest.mark.parametrize(("value_channels", "scale"), [(8, None), (5, 0.2)])
@pytest.mark.parametrize(("dtype", "allowed"), [(torch.float64, 1e-14), (torch.float32, 1e-6), (torch.bfloat16, 2e-2)])
def test_gradients_are_those_of_each_sample_alone(attention_over, value_channels, scale, dtype, allowed):
    for seed in range(20):
        rows = random_rows(np.random.default_rng(seed), 8)
        shared = [0, *(common(a, b) for a, b in zip(rows, rows[1:], strict=False))]
        tree = PrefixTree.of([*map(len, rows)], shared, num_tokens=sum(map(len, rows)) - sum(shared) + 3)
        inputs, grad = drawn(tree, dtype=dtype, value_channels=value_channels, seed=seed)
        assert max(errors(attention_over(tree), tree, inputs, grad, scale=scale)) <= allowed


def test_nodes_are_summed_in_fp32():
    """Of forty turns, each of which goes on from the one before: in bf16 gradients would be 5.7e-3 off."""
    turns = range(40)
    shared = [2 * turn for turn in turns]
    tree = PrefixTree.of([4 + tokens for tokens in shared], shared, num_tokens=4 * len(turns))
    attend = attention.attention_over(tree, device=torch.device("cpu"))
    assert max(errors(attend, tree, *drawn(tree, dtype=torch.bfloat16))) <= 4.5e-3


def drawn(tree, *, dtype, value_channels=8, seed=0):
    """Queries, keys and values of two heads a group, and the gradient of the output."""
    generator = torch.Generator().manual_seed(seed)
    shapes = (4, 7), (2, 7), (2, value_channels), (4, value_channels)
    *inputs, grad = (
        torch.randn(tree.positions.size, *shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes
    )
    return [x.requires_grad_() for x in inputs], grad


def errors(attend, tree, inputs, grad, *, scale=None):
    """Relative ones, of the output and of the gradients of queries, keys and values."""
    out = attend(*inputs, scale=scale)
    ours = (out, *torch.autograd.grad(out, inputs, grad))
    assert {x.dtype for x in ours} == {grad.dtype}

    query, key, value = (x.detach().double().requires_grad_() for x in inputs)
    scores = torch.einsum("qnd,knd->nqk", query, key.repeat_interleave(2, 1)) * (scale or 7**-0.5)
    hidden = ~torch.from_numpy(seen_by(tree))
    weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    dense = torch.einsum("nqk,knd->qnd", weights, value.repeat_interleave(2, 1))
    theirs = (dense, *torch.autograd.grad(dense, (query, key, value), grad.double()))
    return [
        float(((mine.double() - expected).norm() / expected.norm()).detach())
        for mine, expected in zip(ours, theirs, strict=True)
    ]
