"""One training step of a small transformer by any plan: CPU seconds of each rank, and the gradient.

Lengths are an eighth of those planned at full size, and so is the width (320 for 2560): attention has its share of
FLOPs. The ranks of a plan run one after another on one core, micro-batch by micro-batch: packed sequences, attention
within each, forward and backward. Their seconds are CPU time of this process, so that the machine's other work counts
little; a warm-up comes first, and the quickest of three passes counts, micro-batch by micro-batch: in a single one the
first rank pays for memory that the process touches first, and noise was as large as what plans differ by.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from megatron_balance import ModelShape

SCALE, NUM_PASSES = 8, 3
WIDTH, HEADS, LAYERS, VOCABULARY = 320, 5, 2, 512
FFN, EXPERTS, TOPK, EXPERT_FFN = 4 * WIDTH, 8, 2, WIDTH

Ranks = Sequence[Sequence[Sequence[int]]]
"""`[num_ranks][num_microbatches]` lengths of the sequences that train."""


def small_shape(*, is_moe: bool) -> ModelShape:
    return ModelShape(
        hidden_size=WIDTH,
        num_layers=LAYERS,
        num_attention_heads=HEADS,
        num_query_groups=HEADS,
        kv_channels=WIDTH // HEADS,
        ffn_hidden_size=0 if is_moe else FFN,
        padded_vocab_size=VOCABULARY,
        gated_linear_unit=True,
        num_experts=EXPERTS if is_moe else 0,
        moe_router_topk=TOPK if is_moe else 0,
        moe_ffn_hidden_size=EXPERT_FFN if is_moe else 0,
    )


def small_length(length: int) -> int:
    """Tokens that train for a sequence of full size."""
    return max(length // SCALE, 2)


@dataclass(frozen=True)
class Trained:
    """One step: the seconds of each rank's micro-batches, `[num_ranks, most micro-batches]`, and the gradient."""

    seconds: np.ndarray
    gradient: Tensor

    def figures(self, *, together: bool) -> list[float]:
        """CPU seconds of the step, where ranks wait after each micro-batch or once, and those over the mean rank's."""
        step = self.seconds.max(axis=0).sum() if together else self.seconds.sum(axis=1).max()
        return [float(step), float(step / self.seconds.sum(axis=1).mean())]


def train(ranks: Ranks, *, is_moe: bool = False) -> Trained:
    """The step of a plan; the tokens of a sequence depend on its length alone, so that every plan trains the same."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = _Model(is_moe)
    _run(model, [64, 64])
    num_slots = max(map(len, ranks))
    seconds = np.full((NUM_PASSES, len(ranks), num_slots), 0.0)
    for index in range(NUM_PASSES):
        model.zero_grad()
        for rank, slots in enumerate(ranks):
            for slot, lengths in enumerate(slots):
                begin = time.process_time()
                _run(model, lengths)
                seconds[index, rank, slot] = time.process_time() - begin
    gradient = torch.cat([parameter.grad.reshape(-1) for parameter in model.parameters() if parameter.grad is not None])
    return Trained(seconds.min(axis=0), gradient)


def step_of(ranks: Ranks, *, together: bool) -> list[float]:
    """The figures of a plan of sequences of full size, trained at an eighth of their lengths."""
    small = [[[small_length(length) for length in slot] for slot in slots] for slots in ranks]
    return train(small).figures(together=together)


def difference(gradient: Tensor, reference: Tensor) -> float:
    """Of two gradients, over the norm of the second."""
    return float((gradient - reference).norm() / reference.norm())


def _run(model: nn.Module, lengths: Sequence[int]) -> None:
    tokens = torch.cat([torch.arange(length) * (length + 7) % VOCABULARY for length in lengths])
    logits = model(tokens, lengths)
    functional.cross_entropy(logits, tokens.roll(-1), reduction="sum").backward()


class _Model(nn.Module):
    def __init__(self, is_moe: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList([_Layer(is_moe) for _ in range(LAYERS)])
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor, lengths: Sequence[int]) -> Tensor:
        states = self.embedding(tokens)
        for layer in self.layers:
            states = layer(states, lengths)
        return self.head(states)


class _Layer(nn.Module):
    def __init__(self, is_moe: bool) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False) if is_moe else None
        width = EXPERT_FFN if is_moe else FFN
        self.experts = nn.ModuleList([_Expert(width) for _ in range(EXPERTS if is_moe else 1)])

    def forward(self, states: Tensor, lengths: Sequence[int]) -> Tensor:
        heads = self.qkv(states).view(-1, 3, HEADS, WIDTH // HEADS).permute(1, 2, 0, 3)
        parts = [
            functional.scaled_dot_product_attention(*(tensor[None] for tensor in part), is_causal=True)[0]
            for part in heads.split(list(lengths), dim=2)
        ]
        states = states + self.out(torch.cat(parts, dim=1).transpose(0, 1).reshape(-1, WIDTH))
        if self.router is None:
            return states + self.experts[0](states)
        weights, chosen = self.router(states).softmax(dim=-1).topk(TOPK)
        added = torch.zeros_like(states)
        for index, expert in enumerate(self.experts):
            rows, places = torch.where(chosen == index)
            added = added.index_add(0, rows, expert(states[rows]) * weights[rows, places, None])
        return states + added


class _Expert(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.into = nn.Linear(WIDTH, 2 * width, bias=False)
        self.back = nn.Linear(width, WIDTH, bias=False)

    def forward(self, states: Tensor) -> Tensor:
        gate, value = self.into(states).chunk(2, dim=-1)
        return self.back(functional.silu(gate) * value)
