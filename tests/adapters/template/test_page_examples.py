"""The adapters of docs/write-an-adapter.md, as a reader copies them.

NeMo-RL's runs on a double of its packer, and with NEMO_RL_CHECKOUT (marked `checkout`) on its own packer and its own
cut into shards. Its hooks stand for those of every `Installation`.
"""

import importlib
import importlib.metadata
import os
import re
import sys
import types
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from gloo_ranks import run_ranks
from sample_rows import Sample, samples_of

from megatron_balance import BalanceError, CostModel, ModelShape

PAGE = Path(__file__).parents[3] / "docs" / "write-an-adapter.md"
ALGORITHMS, BATCHES = "nemo_rl.data.packing.algorithms", "nemo_rl.distributed.batched_data_dict"
CAP, RANKS = 16384, 8
QWEN3_8B = CostModel.from_shape(ModelShape.preset("Qwen3-8B"))

page = types.ModuleType("page")
for block in re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), flags=re.MULTILINE | re.DOTALL):
    exec(compile(block, PAGE.name, "exec"), vars(page))


class Packer:
    """One sequence after another into the last bin, then as many bins as are asked for."""

    def __init__(self, bin_capacity, min_bins, multiple):
        self.bin_capacity, self.least, self.multiple = bin_capacity, min_bins, multiple

    def pack(self, sequence_lengths):
        bins = [[]]
        for index, length in enumerate(sequence_lengths):
            if sum(sequence_lengths[second] for second in bins[-1]) + length > self.bin_capacity:
                bins.append([])
            bins[-1].append(index)
        while len(bins) < self.least or len(bins) % self.multiple:
            longest = max(range(len(bins)), key=lambda at: len(bins[at]))
            bins.append([bins[longest].pop()])
        return bins


def get_packer(algorithm, bin_capacity, min_bin_count=1, bin_count_multiple=1):
    return Packer(bin_capacity, min_bin_count, bin_count_multiple)


def be_release(monkeypatch, release):
    version = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: release if name == "nemo-rl" else version(name))


@pytest.fixture(params=["double", pytest.param("checkout", marks=pytest.mark.checkout)])
def shard(request, monkeypatch):
    """Cuts a global batch of these lengths into the micro-batches of each rank."""
    be_release(monkeypatch, "0.6.0")
    for name in [name for name in sys.modules if name.partition(".")[0] == "nemo_rl"]:
        monkeypatch.delitem(sys.modules, name)
    if request.param == "double":
        packages = ("nemo_rl", "nemo_rl.data", "nemo_rl.data.packing", "nemo_rl.distributed", ALGORITHMS, BATCHES)
        for name in packages:
            monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
        vars(sys.modules[ALGORITHMS])["get_packer"] = vars(sys.modules[BATCHES])["get_packer"] = get_packer
    else:
        monkeypatch.syspath_prepend(os.environ["NEMO_RL_CHECKOUT"])
    batches = importlib.import_module(BATCHES)

    def by_double(lengths):
        sizes = {"min_bin_count": RANKS, "bin_count_multiple": RANKS}
        bins = batches.get_packer(algorithm="any", bin_capacity=CAP, **sizes).pack(sequence_lengths=lengths)
        return [bins[rank::RANKS] for rank in range(RANKS)]

    def by_checkout(lengths):
        batch = batches.BatchedDataDict(
            ids=torch.arange(len(lengths)), lengths=torch.tensor(lengths), input_ids=torch.zeros(len(lengths), 1)
        )
        packing = {"algorithm": "modified_first_fit_decreasing", "max_tokens_per_microbatch": CAP}
        packing |= {"input_key": "input_ids", "input_lengths_key": "lengths", "sequence_length_pad_multiple": 1}
        shards, order = batch.shard_by_batch_size(shards=RANKS, sequence_packing_args=packing)
        assert list(chain.from_iterable(shard["ids"].tolist() for shard in shards)) == order
        return [[part["ids"].tolist()[start:end] for start, end in part.micro_batch_indices[0]] for part in shards]

    yield by_double if request.param == "double" else by_checkout
    page.installation.undo()


def waiting(ranks, lengths):
    """The costliest micro-batch of every slot over the mean."""
    costs = np.array([[sum(QWEN3_8B(lengths[index]) for index in slot) for slot in slots] for slots in ranks])
    return float(costs.max(axis=0).sum() / costs.mean(axis=0).sum())


def test_slots_are_even_and_every_sequence_runs_once_under_the_cap(shard):
    stock, balanced = [], []
    for seed in range(8):
        lengths = np.clip(np.random.default_rng(seed).lognormal(7.5, 1.2, 256), 16, CAP).astype(int).tolist()
        stock.append(waiting(shard(lengths), lengths))
        page.install(model="Qwen3-8B")
        ranks = shard(lengths)
        page.installation.undo()
        assert sorted(chain.from_iterable(chain.from_iterable(ranks))) == list(range(256))
        assert all(0 < sum(lengths[index] for index in slot) <= CAP for slots in ranks for slot in slots)
        balanced.append(waiting(ranks, lengths))
    assert np.mean(balanced) <= 1.01
    assert np.mean(stock) >= 1.08


def test_installs_once_and_is_undone(shard):
    stock = vars(sys.modules[BATCHES])["get_packer"]
    installed = page.install()
    assert page.install() is installed
    with pytest.raises(BalanceError, match="nemo-rl is hooked already"):
        page.install(objective="step")
    assert vars(sys.modules[BATCHES])["get_packer"] is not stock
    installed.undo()
    assert vars(sys.modules[BATCHES])["get_packer"] is stock


def test_another_release_is_refused_unless_any_is_allowed(shard, monkeypatch):
    be_release(monkeypatch, "0.4.0")
    with pytest.raises(BalanceError, match=r"nemo-rl is 0\.4\.0.*tested on 0\.6.*set MEGATRON_BALANCE_ANY_VERSION=1"):
        page.install()
    assert not page.installation.is_installed()
    monkeypatch.setenv("MEGATRON_BALANCE_ANY_VERSION", "1")
    page.install().undo()


def test_the_switch_leaves_the_host_as_it_is(shard, monkeypatch, caplog):
    monkeypatch.setattr("megatron_balance.hooking._announced_off", set())
    monkeypatch.setenv("MEGATRON_BALANCE", "0")
    for _ in range(2):
        page.install()
    assert not page.installation.is_installed()
    [line] = caplog.messages
    assert line == "MEGATRON_BALANCE=0: nemo-rl runs without balancing, and ignores its flags."


LENGTHS = ([16, 15, 14, 13], [1, 2, 3, 4])


def run_rank():
    """The tokens of each micro-batch of this rank."""
    samples = [Sample({"tokens": torch.full((length,), length)}) for length in LENGTHS[dist.get_rank()]]
    samples = samples_of(samples)
    slots = page.balanced_microbatches(samples, group=dist.group.WORLD, cost_model=CostModel.tokens(), max_tokens=20)
    return [[tokens.tolist() for tokens in slot.columns["tokens"]] for slot in slots]


def test_samples_move_by_plan_and_each_runs_once():
    """Two ranks with very different data run the same number of tokens."""
    slots_of = run_ranks(2, "test_page_examples:run_rank")
    runs = [sequence for slots in slots_of for slot in slots for sequence in slot]
    assert sorted(runs) == sorted([length] * length for lengths in LENGTHS for length in lengths)
    assert len({len(slots) for slots in slots_of}) == 1
    assert all(sum(map(len, slot)) <= 20 for slots in slots_of for slot in slots)
    assert [sum(len(sequence) for slot in slots for sequence in slot) for slots in slots_of] == [34, 34]
