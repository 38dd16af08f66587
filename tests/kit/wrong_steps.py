"""Errors of packing, positions, masks and weights, by name: a table that was written before what finds them.

A function of `SAMPLES` changes the samples of a micro-batch before they are packed, one of `PACKS` what was packed,
one of `WEIGHTS` makes weights of the step's samples from their lengths. They stand in for faults of this package.
"""

import contextlib

import numpy as np
import torch
from megatron.training import training
from torch import Tensor

from megatron_balance import BalanceError
from megatron_balance.hooking import patched_attrs
from megatron_balance.mcore import prepare

Pack = dict[str, Tensor]


def in_turn(watch):
    """Run the first step with each error, of the next items, and then with none; what each says is written."""
    stock = training.get_forward_backward_func

    def get_forward_backward_func(*positional, **keywords):
        schedule = stock(*positional, **keywords)

        def forward_backward(**arguments):
            now = watch.num_steps == 1 and not arguments["forward_only"]
            for error in (*SAMPLES, *PACKS, *WEIGHTS) if now else ():
                text = ""
                with wrong(error):
                    try:
                        schedule(**arguments)
                    except BalanceError as raised:
                        text = str(raised)
                watch.write("verified", error=error, text=text)
            return schedule(**arguments)

        return forward_backward

    training.get_forward_backward_func = get_forward_backward_func


@contextlib.contextmanager
def wrong(error):
    """Make steps with this error in the context."""
    pack, weigh = prepare.pack_microbatch, prepare.loss_weights

    def pack_wrongly(samples, *, token_multiple, **keywords):
        samples = SAMPLES[error](samples) if error in SAMPLES and len(samples) > 1 else samples
        packed = pack(samples, token_multiple=token_multiple, **keywords)
        return PACKS[error](packed, token_multiple) if error in PACKS else packed

    def weigh_wrongly(gathered, **keywords):
        return WEIGHTS[error](gathered.lengths) if error in WEIGHTS else weigh(gathered, **keywords)

    with patched_attrs(prepare, pack_microbatch=pack_wrongly, loss_weights=weigh_wrongly):
        yield


def lose_the_last(samples):
    return samples.select(np.arange(len(samples) - 1))


def run_the_shortest_twice(samples):
    order = np.arange(len(samples))
    order[samples.lengths.argmax()] = samples.lengths.argmin()
    return samples.select(order)


def join_two(packed, token_multiple):
    return packed | {key: _without(starts, index=1) for key, starts in _starts(packed).items()}


def begin_late(packed, token_multiple):
    moved = {key: starts.clone() for key, starts in _starts(packed).items()}
    for starts in moved.values():
        if starts.numel() > 2:
            starts[0, 1] += min(token_multiple, int(starts[0, 2] - starts[0, 1]))
    return packed | moved


def _starts(packed):
    """Of the sequences that hold tokens."""
    keys = [key for key in packed if key.startswith("cu_seqlens")]
    return {key: packed[key].unique().unsqueeze(0) for key in keys}


def _without(starts, *, index):
    return starts if starts.numel() < 3 else torch.cat([starts[:, :index], starts[:, index + 1 :]], dim=1)


def count_through(packed, token_multiple):
    return packed | {"position_ids": torch.arange(packed["position_ids"].numel()).view_as(packed["position_ids"])}


def count_from_one(packed, token_multiple):
    return packed | {"position_ids": packed["position_ids"] + 1}


def learn_padding(packed, token_multiple):
    return packed | {"loss_mask": torch.where(packed["tokens"] == 0, 1.0, packed["loss_mask"])}


def mask_late(packed, token_multiple):
    return packed | {"loss_mask": packed["loss_mask"].roll(1, dims=1)}


def weigh_samples(lengths):
    return lengths.mean() / np.maximum(lengths, 1)


def weigh_the_first_twice(lengths):
    return np.where(np.arange(len(lengths)) == 0, 2.0, 1.0)


SAMPLES = {"a-sample-is-lost": lose_the_last, "a-sample-runs-twice": run_the_shortest_twice}
PACKS = {
    "two-samples-are-joined": join_two,
    "a-boundary-is-late": begin_late,
    "positions-go-on": count_through,
    "positions-begin-at-one": count_from_one,
    "padding-is-learned": learn_padding,
    "the-mask-is-late": mask_late,
}
WEIGHTS = {"samples-count-alike": weigh_samples, "a-sample-counts-twice": weigh_the_first_twice}
