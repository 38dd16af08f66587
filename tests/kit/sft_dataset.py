"""A data set of supervised fine-tuning for Megatron's data loader, one packed (thd) sequence a sample.

A sample is a row of tokens of which only the response is learned, from a jsonl file or from a corpus that needs no
download: the some 6,000 top-level functions and classes of Python's standard library, signature and docstring the
prompt, the rest the response (median about 400 bytes, 99th percentile about 18 kB).

Invariants: a sample and its order depend on the data, the seed and the index alone; labels are tokens shifted by one.
Longer samples are cut at `--seq-length`, and dropped without a learned token.
"""

from __future__ import annotations

import ast
import functools
import json
import sysconfig
import warnings
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from megatron_balance.errors import BalanceError

END_OF_DOCUMENT = 256
"""The token after the 256 bytes that closes a sample of the built-in corpus."""

LEFT_OUT = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test"})
"""Folders that hold other people's packages, or tests: they are not always installed."""


class SftSample(NamedTuple):
    """`[length + 1]` tokens: the model reads all but the last and predicts those of all but the first to be learned."""

    tokens: NDArray[np.int64]
    learned: NDArray[np.bool_]


class SftDataset(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Rows for Megatron's `build_pretraining_data_loader`.

    `num_samples` rows are served; beyond one pass the samples come again in another order, and None is one pass.
    `pad_to_seq_length` pads every row, as stock Megatron needs under tensor, pipeline and context parallelism; padding
    is counted into the sequence, as Megatron's SFTDataset does. The data loader picks its batch size by `split`.
    """

    def __init__(self, samples, *, num_samples, seq_length, pad_to_seq_length, pad_token, seed, split=None):
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
        self._orders = {}

    def __len__(self):
        return self.num_samples

    def sample(self, index):
        """The sample of row `index`."""
        epoch, position = divmod(index, len(self.samples))
        if epoch not in self._orders:
            self._orders[epoch] = np.random.default_rng([self.seed, epoch]).permutation(len(self.samples))
        return self.samples[self._orders[epoch][position]]

    def length(self, index):
        """Tokens of row `index` before padding."""
        return min(self.sample(index).tokens.size - 1, self.seq_length)

    def __getitem__(self, index):
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


def jsonl_samples(path):
    """The lines of a jsonl file: `tokens` and, where not all of them are learned, `loss_mask`."""
    with path.open(encoding="utf-8") as lines:
        for row in map(json.loads, lines):
            tokens = np.asarray(row["tokens"], dtype=np.int64)
            yield SftSample(tokens, np.asarray(row.get("loss_mask", np.ones(tokens.size)), dtype=bool))


@functools.cache  # chunks of a virtual pipeline ask for it again, and it takes seconds
def builtin_samples():
    """The standard library's functions and classes, byte by byte."""
    samples = []
    for prompt, response in stdlib_samples():
        tokens = np.array([*prompt, *response, END_OF_DOCUMENT], dtype=np.int64)
        samples.append(SftSample(tokens, np.arange(tokens.size) >= len(prompt)))
    return tuple(samples)


class PromptResponse(NamedTuple):
    """One sample, as UTF-8 bytes."""

    prompt: bytes
    response: bytes


def stdlib_samples():
    """Every top-level function and class of the standard library, files in sorted order."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(path for path in root.rglob("*.py") if LEFT_OUT.isdisjoint(path.relative_to(root).parts))
    return [sample for path in files for sample in _samples_of(path)]


def _samples_of(path):
    source = path.read_bytes()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # old modules hold invalid escapes
            tree = ast.parse(source)
    except (SyntaxError, ValueError):  # a file kept for another version of Python
        return
    lines = source.splitlines(keepends=True)
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            cut = _end_of_head(node)
            prompt, response = lines[_first_line(node) - 1 : cut], lines[cut : node.end_lineno]
            if response:
                yield PromptResponse(b"".join(prompt), b"".join(response))


def _end_of_head(node):
    """The line after the signature and, where there is one, the docstring."""
    body = node.body[0]
    if ast.get_docstring(node, clean=False) is not None:
        assert body.end_lineno is not None
        return body.end_lineno
    return max(_first_line(body) - 1, node.lineno)


def _first_line(node):
    """The first line of a statement, decorators included."""
    return min([node.lineno, *(decorator.lineno for decorator in getattr(node, "decorator_list", []))])
