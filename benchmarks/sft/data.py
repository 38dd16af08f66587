"""The data that pretrain_gpt.py reads, made from the built-in corpus: conversations for `--sft`, indexed documents for
`--dataloader-inter-document-masking`, and documents that are filled up to the length of a row, for padded rows.

Both depend on the corpus alone, so that every run of a check reads the same.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from sft_dataset import END_OF_DOCUMENT, PromptResponse, stdlib_samples
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

NUM_SAMPLES = 400
"""Of the corpus' some 6,000; more than the steps of a check read."""

MAX_PROMPT_BYTES = 100
MAX_RESPONSE_BYTES = 300
"""Longer documents are cut, so that a row of 512 tokens holds several, of different lengths."""

CONVERSATIONS_IN_A_ROW = (1, 3, 2)
"""In turn, so that rows differ in how much of them is padding."""

PADDING = 257
"""Megatron's NullTokenizer ends documents with it; `--eod-mask-loss` leaves it out of the loss."""

_TEMPLATE = "{% for message in messages %}{{ message['role'] }}\n{{ message['content'] }}{{ eos_token }}{% endfor %}"


@dataclass(frozen=True)
class PretrainData:
    conversations: Path
    tokenizer: Path
    documents: Path
    padded: Path
    full: Path


def write_data(
    folder: Path,
    *,
    seq_length: int,
    whole: bool = False,
    in_a_row: Sequence[int] = CONVERSATIONS_IN_A_ROW,
    num_samples: int | None = NUM_SAMPLES,
) -> PretrainData:
    """Write all data of a check into a folder; megatron.core must be importable. Samples are cut, or `whole`.

    `num_samples`: of the corpus, None for all.

    `lengths.jsonl` has the tokens of every conversation, a row a line.
    """
    folder.mkdir(parents=True, exist_ok=True)
    paths = (folder / name for name in ("conversations.jsonl", "tokenizer", "documents", "padded", "full"))
    data = PretrainData(*paths)
    samples = _samples(whole=whole, num_samples=num_samples)
    _write_conversations(data.conversations, samples=samples, in_a_row=in_a_row)
    _write_tokenizer(data.tokenizer)
    documents = [[*sample.prompt, *sample.response, END_OF_DOCUMENT] for sample in samples]
    _write_documents(data.documents, documents)
    _write_documents(data.padded, [tokens + [PADDING] * (seq_length - len(tokens)) for tokens in documents])
    every = list(itertools.chain.from_iterable(documents))
    starts = range(0, len(every) - seq_length + 1, seq_length)
    _write_documents(data.full, [every[start : start + seq_length] for start in starts])
    return data


def _samples(*, whole: bool, num_samples: int | None) -> list[PromptResponse]:
    """In an order of their own: the corpus' neighbours come from one file and resemble one another."""
    corpus = stdlib_samples()
    chosen = np.random.default_rng(0).permutation(len(corpus))[:num_samples]
    if whole:
        return [corpus[index] for index in chosen]
    return [
        PromptResponse(corpus[index].prompt[:MAX_PROMPT_BYTES], corpus[index].response[:MAX_RESPONSE_BYTES])
        for index in chosen
    ]


def _write_conversations(path: Path, *, samples: Sequence[PromptResponse], in_a_row: Sequence[int]) -> None:
    """A system message begins a conversation; SFTDataset makes each a sequence of its row."""
    conversations = iter([_conversation(sample) for sample in samples])
    with path.open("w", encoding="utf-8") as out, path.with_name("lengths.jsonl").open("w") as lengths:
        for num_conversations in itertools.cycle(in_a_row):
            row = list(itertools.islice(conversations, num_conversations))
            if not row:
                return
            messages = [list(conversation) for conversation in row]
            out.write(json.dumps({"messages": list(itertools.chain.from_iterable(messages))}) + "\n")
            lengths.write(json.dumps([sum(map(_num_tokens, turns)) for turns in messages]) + "\n")


def _conversation(sample: PromptResponse) -> Iterator[dict[str, str]]:
    yield {"role": "system", "content": "Continue."}
    yield {"role": "user", "content": sample.prompt.decode(errors="replace")}
    yield {"role": "assistant", "content": sample.response.decode(errors="replace")}


def _num_tokens(message: dict[str, str]) -> int:
    """As `_TEMPLATE` and the tokenizer have it: a token a byte, and the end."""
    return len(f"{message['role']}\n{message['content']}".encode()) + 1


def _write_tokenizer(folder: Path) -> None:
    """One token a byte, and one each that ends a message and pads."""
    folder.mkdir(parents=True, exist_ok=True)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<eos>", "<pad>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>", "pad_token": "<pad>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": _TEMPLATE}))


def _write_documents(prefix: Path, documents: Sequence[Sequence[int]]) -> None:
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16)
    for document in documents:
        builder.add_document(torch.tensor(document), [len(document)])
    builder.finalize(f"{prefix}.idx")
