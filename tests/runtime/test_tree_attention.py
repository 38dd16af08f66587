"""Attention over trees, against a dense mask: outputs and all gradients."""

import numpy as np
import pytest
import torch
from test_prefix_packing import common, random_rows, seen_by

from megatron_balance import BalanceError
from megatron_balance.mcore import tree_attention as attention
from megatron_balance.samples.prefix_packing import PrefixTree


@pytest.mark.parametrize(("value_channels", "scale"), [(8, None), (5, 0.2)])
@pytest.mark.parametrize(("dtype", "allowed"), [(torch.float64, 1e-14), (torch.float32, 1e-6), (torch.bfloat16, 2e-2)])
def test_gradients_are_those_of_each_sample_alone(value_channels, scale, dtype, allowed):
    for seed in range(20):
        rows = random_rows(np.random.default_rng(seed), 8)
        shared = [0, *(common(a, b) for a, b in zip(rows, rows[1:], strict=False))]
        tree = PrefixTree.of([*map(len, rows)], shared, num_tokens=sum(map(len, rows)) - sum(shared) + 3)
        assert max(errors(tree, dtype=dtype, value_channels=value_channels, scale=scale, seed=seed)) <= allowed


def test_depths_are_summed_in_fp32():
    """Of forty turns, each of which goes on from the one before: in bf16 gradients of queries would be 5.7e-3 off."""
    turns = range(40)
    shared = [2 * turn for turn in turns]
    tree = PrefixTree.of([4 + tokens for tokens in shared], shared, num_tokens=4 * len(turns))
    assert errors(tree, dtype=torch.bfloat16)[1] <= 4.5e-3


def errors(tree, *, dtype, value_channels=8, scale=None, seed=0):
    """Relative ones, of the output and of the gradients of queries, keys and values; two heads a group."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(tree.positions.size, *shape, generator=generator, dtype=torch.float64).to(dtype)

    inputs = [draw(4, 7).requires_grad_(), draw(2, 7).requires_grad_(), draw(2, value_channels).requires_grad_()]
    calls = attention.calls_of(tree, device="cpu")
    out = attention.tree_attention(*inputs, calls, scale=scale, backend=attention.OF_CPU)
    grad = draw(4, value_channels)
    ours = (out, *torch.autograd.grad(out, inputs, grad))
    assert {x.dtype for x in ours} == {dtype}

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


@pytest.mark.parametrize(
    ("versions", "expected"),
    [
        ({"torch": "2.10.0"}, attention.OF_TORCH),
        ({"torch": "2.9.1", "flash-attn": "2.7.4.post1"}, attention.OF_FLASH_ATTENTION),
        ({"torch": "2.9.1", "flash-attn": "2.6.3"}, None),
        ({"torch": "2.9.1"}, None),
    ],
)
def test_kernels_are_those_of_what_is_installed(monkeypatch, versions, expected):
    monkeypatch.setattr(attention, "device_kind", lambda: "cpu")
    assert attention.kernels() is attention.OF_CPU
    monkeypatch.setattr(attention, "device_kind", lambda: "cuda")
    monkeypatch.setattr(attention, "version_of", versions.get)
    if expected is not None:
        assert attention.kernels() is expected
        return
    with pytest.raises(BalanceError, match=r"install torch 2\.10 or newer, or flash-attn"):
        attention.kernels()
