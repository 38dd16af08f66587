"""A data set of supervised fine-tuning for Megatron's data loader, one packed (thd) sequence a sample.

A sample is a row of tokens of which only the response is learned. It comes from the built-in corpus or
from a jsonl file whose lines hold `prompt` and `response`, or `messages`, or `tokens` (with an optional
`loss_mask`). Longer samples are cut at `--seq-length`; samples left without a learned token are dropped.

Invariants: a sample and its order depend on the data, the seed and the index alone, so every rank sees
the same data set; labels are tokens shifted by one; the last token kept is learned, unless the sample was cut there.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable, Iterator
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
    return tuple(
        _prompt_response(list(sample.prompt), [*sample.response, END_OF_DOCUMENT]) for sample in stdlib_samples()
    )


def jsonl_samples(path: Path, tokenizer: Any) -> Iterator[SftSample]:
    """The lines of a jsonl file.

    Args:
        path: the file.
        tokenizer: one of Megatron's (`megatron.core.tokenizers`).

    Raises:
        BalanceError: the file or a line cannot be used; the message names the line.
    """
    if not path.is_file():
        raise BalanceError(f"--data-path {path}: there is no such file; give a jsonl file.")
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                yield _parse(line, where=f"{path} line {number}", tokenizer=tokenizer)


def _parse(line: str, *, where: str, tokenizer: Any) -> SftSample:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise BalanceError(f"{where} is not JSON ({error}): write one object a line.") from error
    for keys, read in _READERS.items():
        if isinstance(row, dict) and all(key in row for key in keys):
            return read(row, where, tokenizer)
    raise BalanceError(f"{where} has none of: " + "; ".join(" and ".join(keys) for keys in _READERS) + ".")


def _read_tokens(row: dict[str, Any], where: str, tokenizer: Any) -> SftSample:
    tokens = np.asarray(row["tokens"])
    if tokens.ndim != 1 or tokens.size < 2 or not np.issubdtype(tokens.dtype, np.integer):
        raise BalanceError(f"{where}: `tokens` must be a list of at least two integers.")
    learned = np.asarray(row.get("loss_mask", np.ones(tokens.size)), dtype=bool)
    if learned.shape != tokens.shape:
        raise BalanceError(f"{where}: `loss_mask` has {learned.size} entries for {tokens.size} tokens.")
    return SftSample(tokens.astype(np.int64), learned)


def _read_prompt_response(row: dict[str, Any], where: str, tokenizer: Any) -> SftSample:
    prompt, response = (_tokenize(row[key], where, tokenizer) for key in ("prompt", "response"))
    return _prompt_response(prompt, [*response, tokenizer.eod])


def _read_messages(row: dict[str, Any], where: str, tokenizer: Any) -> SftSample:
    messages = row["messages"]
    if getattr(tokenizer, "library", None) == "sft":
        tokens, targets = tokenizer.tokenize_conversation(messages, return_target=True, add_generation_prompt=False)
        return SftSample(np.asarray(tokens, dtype=np.int64), np.asarray(targets) >= 0)
    if getattr(tokenizer, "chat_template", None) is None:
        raise BalanceError(f"{where} has `messages`, but the tokenizer has no chat template: pass --chat-template.")
    rendered = _render(messages, tokenizer, generation=False)
    learned = np.zeros(len(rendered), dtype=bool)
    for turn, message in enumerate(messages):
        if message["role"] == "assistant":
            start = len(_render(messages[:turn], tokenizer, generation=True))
            learned[start : len(_render(messages[: turn + 1], tokenizer, generation=False))] = True
    return SftSample(np.asarray(rendered, dtype=np.int64), learned)


def _render(messages: list[dict[str, str]], tokenizer: Any, *, generation: bool) -> list[int]:
    out = tokenizer.apply_chat_template(messages, tokenize=True, add_generation_prompt=generation)
    return list(out["input_ids"] if hasattr(out, "keys") else out)


def _tokenize(text: Any, where: str, tokenizer: Any) -> list[int]:
    if not isinstance(text, str):
        raise BalanceError(f"{where}: {text!r} is not text.")
    try:
        return list(tokenizer.tokenize(text))
    except ValueError as error:  # NullTokenizer reads numbers only
        raise BalanceError(
            f"{where}: the tokenizer cannot read text; pass --tokenizer-type HuggingFaceTokenizer (or another), "
            "or give `tokens`."
        ) from error


def _prompt_response(prompt: list[int], response: list[int]) -> SftSample:
    learned = np.zeros(len(prompt) + len(response), dtype=bool)
    learned[len(prompt) :] = True
    return SftSample(np.array([*prompt, *response], dtype=np.int64), learned)


_READERS: dict[tuple[str, ...], Callable[[dict[str, Any], str, Any], SftSample]] = {
    ("tokens",): _read_tokens,
    ("messages",): _read_messages,
    ("prompt", "response"): _read_prompt_response,
}
