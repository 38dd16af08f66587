"""The padding mask made from lengths is that of the micro-batch packed from samples, on every context-parallel rank."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_balance.samples import (
    Sample,
    SampleSchema,
    dummy_microbatch,
    pack_microbatch,
    padding_mask,
    sequence_lengths,
)

REAL = 7
parallelism = st.sampled_from([(1, 1), (2, 1), (4, 2), (8, 2), (8, 4), (16, 4)])  # token_multiple, cp_size
rows = st.lists(st.lists(st.integers(0, 40), min_size=1, max_size=3), min_size=1, max_size=6)


def sample(lengths):
    """Of several sequences, every token REAL; the packer pads with 0."""
    total = sum(lengths)
    per_token = {name: torch.full((total,), REAL) for name in ("tokens", "labels", "loss_mask")}
    return Sample(per_token, segment_lengths=tuple(lengths))


def zigzag(bounds, *, cp_size, cp_rank):
    """Tokens of a rank: each sequence is cut into 2 cp_size pieces, of which it holds one from either end."""
    held = []
    for start, end in itertools.pairwise(bounds):
        pieces = torch.arange(start, end).chunk(2 * cp_size) if cp_size > 1 else [torch.arange(start, end)]
        held += [pieces[cp_rank], pieces[-1 - cp_rank]] if cp_size > 1 else pieces
    return torch.cat(held)


@given(rows, parallelism, st.sampled_from([None, 1024, 1040]))
def test_each_rank_finds_the_padding_of_its_tokens(lengths, parallel, num_tokens):
    token_multiple, cp_size = parallel
    samples = [sample(row) for row in lengths]
    pack = pack_microbatch(samples, token_multiple=token_multiple, cp_size=cp_size, num_tokens=num_tokens)
    tokens = pack["tokens"][0]
    bounds = pack.get("cu_seqlens_padded", pack["cu_seqlens"])[0].tolist()
    for cp_rank in range(cp_size):
        held = tokens[zigzag(bounds, cp_size=cp_size, cp_rank=cp_rank)]
        mask = padding_mask(
            sequence_lengths(samples),
            num_tokens=len(tokens),
            token_multiple=token_multiple,
            cp_size=cp_size,
            cp_rank=cp_rank,
        )
        assert np.array_equal(mask, (held != REAL).numpy())


@pytest.mark.parametrize(("token_multiple", "cp_size"), [(1, 1), (8, 2)])
def test_a_dummy_is_padding_alone(token_multiple, cp_size):
    dummy = dummy_microbatch(SampleSchema.of(sample([3])), token_multiple=token_multiple, cp_size=cp_size)
    mask = padding_mask([], num_tokens=dummy["tokens"].shape[1], token_multiple=token_multiple, cp_size=cp_size)
    assert mask.all()
    assert mask.size == token_multiple // cp_size


def test_lengths_of_another_micro_batch_are_an_error():
    with pytest.raises(AssertionError, match="sequences need 24 tokens, and there are 16"):
        padding_mask([9, 3], num_tokens=16, token_multiple=8)
