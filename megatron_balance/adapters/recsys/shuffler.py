"""The shuffler's methods: `shuffle`, or its two halves around the model's forward pass.

They take upstream's own, and then its parameters.

All ranks learn the workloads (FLOPs of one layer) and lengths of all real samples, plan alike, and move them, all
columns in one exchange. Every rank gets nearly the same workload, and as many samples or one fewer.

A sample has an entry in a column for each value of a key of a KeyedJaggedTensor, another for its weight, and its share
of each dense tensor, of whatever shape. The shuffler's thread plans while the model computes; collectives run on the
calling thread alone. The handle between the halves holds everything, so that several batches may be under way.

Upstream's convention for an incomplete batch: samples from `actual_batch_size` on are padding, at the end, with no
values in any key; after a shuffle, dense tensors hold the real samples alone and keys hold all. Padding is known from
`actual_batch_size`, never from a workload of 0: a real sample may have no tokens.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from megatron_balance.adapters.kit import Function, even_parts
from megatron_balance.cost.model import CostModel
from megatron_balance.errors import BalanceError
from megatron_balance.model.shape import ModelShape
from megatron_balance.runtime.exchange import reroute_samples
from megatron_balance.runtime.failure import Failure, attempt
from megatron_balance.runtime.gather import GatheredLengths, gather_lengths
from megatron_balance.samples.sample import Kind, Samples

Ints = NDArray[np.int64]

MODELS = ("hstu", "sid_gr")
"""Names of the layers with known FLOPs, as upstream's shufflers have them."""


@dataclass(frozen=True, eq=False)
class PendingShuffle:
    """A batch between the two halves; pass it back as it is."""

    samples: Samples
    gathered: GatheredLengths  # the real samples of all ranks, with their workloads as values
    group: dist.ProcessGroup
    plan: Future[Ints]  # `[num_samples]` rank of each sample


def shuffle(
    stock: Function,
    self: Any,
    batch: Any,
    pg_group: dist.ProcessGroup | None = None,
    return_indices: bool = False,
    return_workloads: bool = False,
    use_all2all: bool = False,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """The new batch, or a tuple of it and what is asked for, each `[batch_size]` int64, padding last.

    Indices are the positions that samples come from, in the old batches of all ranks, one after the other; workloads
    are 0 for padding. `use_all2all` does not matter: all-gather gives the same batch, so all-to-all moves them.
    BalanceError on every rank where batches differ, or one cannot be cut into samples.
    """
    pending = start_shuffle_async(stock, self, batch, pg_group, *args, **kwargs)
    outputs = [finish_shuffle(stock, self, batch, pending)]
    if return_indices or return_workloads:
        positions, costs = _origins(pending, batch_size=batch.batch_size)
        extras = [positions] * return_indices + [costs] * return_workloads
        outputs += [torch.from_numpy(values).to(batch.features.values().device) for values in extras]
    return tuple(outputs) if len(outputs) > 1 else outputs[0]


def _origins(pending: PendingShuffle, *, batch_size: int) -> tuple[Ints, Ints]:
    """The positions that this rank's new samples come from, real ones and then padding, and their workloads."""
    gathered, ranks = pending.gathered, pending.plan.result()
    rank, dp_size, homes = pending.group.rank(), pending.group.size(), gathered.home_ranks
    positions = homes * batch_size + np.arange(homes.size) - np.searchsorted(homes, homes)
    padding = np.setdiff1d(np.arange(dp_size * batch_size), positions, assume_unique=True)
    num_padding = batch_size - np.bincount(ranks, minlength=dp_size)
    first, count = num_padding[:rank].sum(), num_padding[rank]
    costs = np.append(gathered.values[ranks == rank, 0], np.zeros(count, dtype=np.int64))
    return np.append(positions[ranks == rank], padding[first : first + count]), costs


def start_shuffle_async(
    stock: Function, self: Any, batch: Any, pg_group: dist.ProcessGroup | None = None, *args: Any, **kwargs: Any
) -> PendingShuffle:
    """The first half: gathers workloads and lengths, and plans in the shuffler's thread; raises as `shuffle`."""
    group = dist.group.WORLD if pg_group is None else pg_group
    assert group is not None, "a shuffle needs torch.distributed to be initialised"
    samples = attempt(lambda: _samples(batch, self.get_workloads(batch, *args, **kwargs)))
    settings = {"batch_size": str(batch.batch_size)}
    gathered = gather_lengths(samples, group=group, settings=settings, device=batch.features.values().device)
    assert not isinstance(samples, Failure), "every rank has raised it"
    plan = self._kk_executor.submit(_plan, gathered.values[:, 0], dp_size=group.size())
    return PendingShuffle(samples, gathered, group, plan)


def finish_shuffle(
    stock: Function,
    self: Any,
    batch: Any,
    handle: PendingShuffle,
    pg_group: dist.ProcessGroup | None = None,
    use_all2all: bool = False,
) -> Any:
    """The second half: waits for the plan and moves the samples; the ranks are those of the first half."""
    _, moved = reroute_samples(
        handle.samples,
        destinations=handle.plan.result(),
        gathered=handle.gathered,
        group=handle.group,
        device=batch.features.values().device,
    )
    return _join(batch, moved)


def make_shuffler_class(base: type) -> type:
    """The class that is registered as "megatron_balance"; `base` is upstream's, hooked."""

    class MegatronBalanceShuffler(base):
        """Balances by the FLOPs of a layer.

        Args:
            num_heads: attention heads.
            head_dim: width of one.
            action_interleaved: every item is followed by an action, which doubles its sequence; by default for HSTU.
            model: `hstu` (four projections) or `sid_gr` (three, and an MLP).

        Raises:
            BalanceError: there is no such model, or a size is not a positive integer.
        """

        def __init__(
            self,
            num_heads: int = 1,
            head_dim: int = 1,
            action_interleaved: bool | None = None,
            *,
            model: str = "hstu",
        ) -> None:
            super().__init__()
            self.cost_model = layer_cost(model, num_heads=num_heads, head_dim=head_dim)
            self.model = model
            self.action_interleaved = model == "hstu" if action_interleaved is None else action_interleaved

        def get_workloads(self, batch: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
            """FLOPs of every sample, `[batch_size]` int64."""
            name = batch.item_feature_name if self.model == "hstu" else batch.history_feature_name
            lengths = batch.features[name].lengths()
            return workloads(lengths, cost_model=self.cost_model, tokens_per_entry=1 + self.action_interleaved)

    return MegatronBalanceShuffler


@lru_cache
def layer_cost(model: str, *, num_heads: int, head_dim: int) -> CostModel:
    """The cost of one layer, `num_heads * head_dim` wide. Attention is causal, and its heads are counted once.

    HSTU has four projections (query, key, value and the gate U) and no MLP; SID-GR has three and an MLP of four times
    the width. Both are layers that the planner's FLOPs know: U is an output gate as wide as the queries.
    """
    if model not in MODELS:
        raise BalanceError(f"model is {model!r}: it must be one of {', '.join(MODELS)}.")
    hidden_size = num_heads * head_dim
    shape = ModelShape(
        hidden_size=hidden_size,
        num_layers=1,
        num_attention_heads=num_heads,
        num_query_groups=num_heads,
        kv_channels=head_dim,
        ffn_hidden_size=4 * hidden_size,
        # ModelShape needs an output layer; one of a single row adds next to nothing.
        padded_vocab_size=1,
        gated_linear_unit=False,
        attention_output_gate=model == "hstu",
        hybrid_layer_pattern="*" if model == "hstu" else "",
    )
    return CostModel.from_shape(shape)


def workloads(lengths: Any, *, cost_model: CostModel, tokens_per_entry: int = 1) -> torch.Tensor:
    """The cost of sequences in int64, whatever the integer type of their lengths: a tensor, or what torch makes one of.

    int32 lengths, which a KeyedJaggedTensor often has, would wrap: 8192 tokens at 4 heads of 256 are far over 2**31.
    """
    num_tokens = torch.as_tensor(lengths).to(torch.int64) * tokens_per_entry
    return cost_model.linear * num_tokens + cost_model.quadratic * num_tokens * num_tokens


def _plan(costs: Ints, *, dp_size: int) -> Ints:
    """`[num_samples]` the rank of every sample. Padding costs nothing, is not planned, and goes where there is room."""
    ranks = np.arange(costs.size) % dp_size
    if costs.size > dp_size:
        for rank, part in enumerate(even_parts(costs, num_parts=dp_size, equal_count=True)):
            ranks[part] = rank
    return ranks


def _samples(batch: Any, workloads: torch.Tensor) -> Samples:
    """The real samples of a batch, each with its workload as value; whatever cannot be cut into samples raises."""
    size, fields = batch.batch_size, dict(_fields(batch))
    lengths = {name: value.lengths() for name, value in fields.items() if isinstance(value, KeyedJaggedTensor)}
    for name, entries in lengths.items():
        if entries.numel() != size * len(fields[name].keys()):
            raise BalanceError(f"{name} has {entries.numel()} lengths: each of its keys must have batch_size, {size}.")
    # To the host in one transfer: the workloads, then the lengths of every key.
    flat = torch.cat([part.to(torch.int64).reshape(-1) for part in (workloads.reshape(size), *lengths.values())])
    costs, *key_lengths = flat.cpu().numpy().reshape(-1, size)
    columns, kinds = dict[str, Sequence[torch.Tensor]](), dict[str, Kind]()
    for name, value in fields.items():
        if name not in lengths:
            columns[name] = value.reshape(size, value.shape[0] // size, *value.shape[1:]).unbind()
            kinds[name] = "per_sample"
            continue
        keys = list(value.keys())
        entries = [entry for _ in keys for entry in key_lengths.pop(0).tolist()]
        for suffix, tensor in _parts(value):
            pieces = tensor.split(entries)
            for index, key in enumerate(keys):
                columns[f"{name}/{key}{suffix}"] = pieces[index * size : (index + 1) * size]
                kinds[f"{name}/{key}{suffix}"] = "ragged"
    real = np.arange(batch.actual_batch_size)
    samples = Samples.from_columns(columns, kinds=kinds, lengths=np.ones(size, dtype=np.int64)).select(real)
    return dataclasses.replace(samples, values=costs[real, None])


def _join(batch: Any, samples: Samples) -> Any:
    """A batch of the same class with these samples, and then padding."""
    replaced: dict[str, Any] = {}

    def column(name: str) -> Sequence[torch.Tensor]:
        return samples.columns.get(name, ())

    for name, value in _fields(batch):
        if not isinstance(value, KeyedJaggedTensor):
            replaced[name] = torch.cat([value[:0], *column(name)])
            continue
        keys = list(value.keys())
        columns = [
            torch.cat([tensor[:0], *(entries for key in keys for entries in column(f"{name}/{key}{suffix}"))])
            for suffix, tensor in _parts(value)
        ]
        lengths = np.zeros((len(keys), batch.batch_size), dtype=np.int64)
        for row, key in zip(lengths, keys, strict=True):
            row[: len(samples)] = [*map(len, column(f"{name}/{key}"))]
        replaced[name] = KeyedJaggedTensor.from_lengths_sync(
            keys=keys,
            values=columns[0],
            weights=columns[1] if len(columns) > 1 else None,
            lengths=torch.from_numpy(lengths.reshape(-1)).to(value.lengths()),
        )
    return dataclasses.replace(batch, actual_batch_size=len(samples), **replaced)


def _fields(batch: Any) -> Iterator[tuple[str, Any]]:
    """The fields that hold samples, by name."""
    for field in dataclasses.fields(batch):
        value = getattr(batch, field.name)
        if isinstance(value, (torch.Tensor, KeyedJaggedTensor)):
            yield field.name, value


def _parts(value: KeyedJaggedTensor) -> list[tuple[str, torch.Tensor]]:
    """The values, and the weights where there are any, with the suffixes of their columns."""
    weights = value.weights_or_none()
    return [("", value.values())] + ([] if weights is None else [("/weights", weights)])
