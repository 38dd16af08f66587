"""A data set of supervised fine-tuning for Megatron's data loader, one packed (thd) sequence a sample.

A sample is a row of tokens of which only the response is learned, from the built-in corpus or a jsonl file. Longer
samples are cut at `--seq-length`; samples left without a learned token are dropped.

Invariants: a sample and its order depend on the data, the seed and the index alone, so every rank sees
the same data set; labels are tokens shifted by one; the last token kept is learned, unless the sample was cut there.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from stdlib_corpus import stdlib_samples

from megatron_balance.errors import BalanceError

END_OF_DOCUMENT = 256
"""The token after the 256 bytes that closes a sample of the built-in corpus."""


@dataclass(frozen=True)
class SftSample:
    """One sample.

    Attributes:
        tokens: `[length + 1]` int64; the model reads all but the last and predicts all but the first.
        learned: `[length + 1]` bool; True where a token is to be predicted.
    """

    tokens: NDArray[np.int64]
    learned: NDArray[np.bool_]


class SftDataset(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Rows for Megatron's `build_pretraining_data_loader`.

    Args:
        samples: the data set, as yielded by `builtin_samples` or `jsonl_samples`.
        num_samples: rows to serve; beyond one pass the samples come again in another order. None for one pass.
        seq_length: `--seq-length`, the most tokens a row may have.
        pad_to_seq_length: pad every row to seq_length, as stock Megatron needs under tensor, pipeline
            and context parallelism. Padding is counted into the sequence, as Megatron's SFTDataset does.
        pad_token: token id of padding.
        seed: of the order.
        split: Megatron's `Split`, by which the data loader picks its batch size.

    Raises:
        BalanceError: no sample has a learned token within seq_length.
    """

    def __init__(
        self,
        samples: Iterable[SftSample],
        *,
        num_samples: int | None,
        seq_length: int,
        pad_to_seq_length: bool,
        pad_token: int,
        seed: int,
        split: Any = None,
    ) -> None:
        self.samples = [sample for sample in samples if sample.learned[1 : seq_length + 1].any()]
        if not self.samples:
            raise BalanceError(
                f"no sample has a token to learn within --seq-length {seq_length}: raise it or shorten the prompts."
            )
        self.num_samples = len(self.samples) if num_samples is None else num_samples
        self.seq_length = seq_length
        self.pad_to_seq_length = pad_to_seq_length
        self.pad_token = pad_token
        self.seed = seed
        self.split = split
        self._orders: dict[int, NDArray[np.int64]] = {}

    def __len__(self) -> int:
        return self.num_samples

    def sample(self, index: int) -> SftSample:
        """The sample of row `index`."""
        epoch, position = divmod(index, len(self.samples))
        if epoch not in self._orders:
            self._orders[epoch] = np.random.default_rng([self.seed, epoch]).permutation(len(self.samples))
        return self.samples[self._orders[epoch][position]]

    def length(self, index: int) -> int:
        """Tokens of row `index` before padding."""
        return min(self.sample(index).tokens.size - 1, self.seq_length)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        sample, length = self.sample(index), self.length(index)
        total = self.seq_length if self.pad_to_seq_length else length
        padding = (0, total - length)
        return {
            "tokens": torch.from_numpy(np.pad(sample.tokens[:length], padding, constant_values=self.pad_token)),
            "labels": torch.from_numpy(np.pad(sample.tokens[1 : length + 1], padding, constant_values=self.pad_token)),
            "loss_mask": torch.from_numpy(np.pad(sample.learned[1 : length + 1].astype(np.float32), padding)),
            "position_ids": torch.arange(total),
            "cu_seqlens": torch.tensor([0, total], dtype=torch.int32),
            "max_seqlen": torch.tensor(total, dtype=torch.int32),
        }


@functools.cache  # chunks of a virtual pipeline ask for it again, and it takes seconds
def builtin_samples() -> tuple[SftSample, ...]:
    """The standard library's functions and classes, byte by byte."""
    samples = []
    for sample in stdlib_samples():
        tokens = np.array([*sample.prompt, *sample.response, END_OF_DOCUMENT], dtype=np.int64)
        samples.append(SftSample(tokens, np.arange(tokens.size) >= len(sample.prompt)))
    return tuple(samples)


def jsonl_samples(path: Path) -> Iterator[SftSample]:
    """The lines of a jsonl file: `tokens` and, where not all of them are learned, `loss_mask`."""
    with path.open(encoding="utf-8") as lines:
        for row in map(json.loads, lines):
            tokens = np.asarray(row["tokens"], dtype=np.int64)
            yield SftSample(tokens, np.asarray(row.get("loss_mask", np.ones(tokens.size)), dtype=bool))
