"""The SFT data set that tests train on: what a row shows, where it is cut, what a broken file gets. No public name."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from sft_dataset import END_OF_DOCUMENT, SftDataset, SftSample, builtin_samples, jsonl_samples
from stdlib_corpus import stdlib_samples

from megatron_balance import BalanceError
from megatron_balance.runtime import split_packed


class Numbers:
    """A tokenizer like Megatron's NullTokenizer: text is numbers."""

    eod = 99
    chat_template = None

    def tokenize(self, text: str) -> list[int]:
        return [int(word) for word in text.split()]


class Turns(Numbers):
    """A tokenizer with a chat template: a turn is its role, its words and an end."""

    chat_template = "role words end"

    def apply_chat_template(
        self, messages: list[dict[str, str]], tokenize: bool, add_generation_prompt: bool
    ) -> list[int]:
        assert tokenize
        turns = [[len(message["role"]), *self.tokenize(message["content"]), 50] for message in messages]
        return [token for turn in turns for token in turn] + ([len("assistant")] if add_generation_prompt else [])


def dataset(samples: list[SftSample], *, seq_length: int = 16, pad: bool = False, num_samples: int = 100) -> SftDataset:
    return SftDataset(
        samples, num_samples=num_samples, seq_length=seq_length, pad_to_seq_length=pad, pad_token=0, seed=7
    )


def sample(tokens: list[int], learned: list[int]) -> SftSample:
    return SftSample(np.array(tokens), np.array(learned, dtype=bool))


def read(tmp_path: Path, *rows: object, tokenizer: object = None) -> list[SftSample]:
    path = tmp_path / "data.jsonl"
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
    return list(jsonl_samples(path, tokenizer or Numbers()))


def test_a_row_predicts_the_next_token_of_the_response() -> None:
    row = dataset([sample([10, 11, 12, 13, 14], [0, 0, 1, 1, 1])])[0]
    assert row["tokens"].tolist() == [10, 11, 12, 13]
    assert row["labels"].tolist() == [11, 12, 13, 14]
    assert row["loss_mask"].tolist() == [0, 1, 1, 1]
    assert row["position_ids"].tolist() == [0, 1, 2, 3]
    assert row["cu_seqlens"].tolist() == [0, 4]
    assert int(row["max_seqlen"]) == 4


def test_padding_is_stripped_again_before_balancing() -> None:
    plain = dataset([sample([10, 11, 12, 13, 14], [0, 0, 1, 1, 1])])[0]
    padded = dataset([sample([10, 11, 12, 13, 14], [0, 0, 1, 1, 1])], pad=True)[0]
    assert padded["tokens"].shape == (16,)
    [back] = split_packed({key: value.unsqueeze(0) for key, value in padded.items()})
    for key in ("tokens", "labels", "loss_mask", "position_ids"):
        assert torch.equal(back.per_token[key], plain[key])


def test_long_samples_are_cut_and_those_without_a_learned_token_dropped() -> None:
    long, prompt_only = sample(list(range(40)), [0] + [1] * 39), sample(list(range(40)), [0] * 20 + [1] * 20)
    rows = dataset([long, prompt_only])
    assert len(rows.samples) == 1
    assert rows.length(0) == 16
    with pytest.raises(BalanceError, match="no sample has a token to learn within --seq-length 16"):
        dataset([prompt_only])


def test_the_order_depends_on_seed_and_index_alone_and_changes_every_epoch() -> None:
    samples = [sample([index, index + 1], [0, 1]) for index in range(20)]
    first, second = dataset(samples), dataset(samples)
    order = [int(first[index]["tokens"][0]) for index in range(40)]
    assert order[30:] == [int(second[index]["tokens"][0]) for index in range(30, 40)]
    assert sorted(order[:20]) == sorted(order[20:]) == list(range(20))
    assert order[:20] != order[20:]


def test_the_built_in_corpus_is_uneven_and_large_enough() -> None:
    lengths = np.array([len(sample.prompt) + len(sample.response) for sample in stdlib_samples()])
    assert lengths.size > 3000
    assert np.percentile(lengths, 99) > 15 * np.median(lengths)
    first = builtin_samples()[0]
    assert first.tokens[-1] == END_OF_DOCUMENT
    assert first.learned[-1]
    assert not first.learned[0]


def test_prompt_and_response(tmp_path: Path) -> None:
    [row] = read(tmp_path, {"prompt": "1 2 3", "response": "4 5"})
    assert row.tokens.tolist() == [1, 2, 3, 4, 5, 99]
    assert row.learned.tolist() == [False] * 3 + [True] * 3


def test_tokens_with_and_without_a_mask(tmp_path: Path) -> None:
    masked, whole = read(tmp_path, {"tokens": [1, 2, 3], "loss_mask": [0, 1, 0]}, {"tokens": [4, 5]})
    assert masked.learned.tolist() == [False, True, False]
    assert whole.learned.all()


def test_messages_learn_what_the_assistant_says(tmp_path: Path) -> None:
    turns = [
        {"role": "user", "content": "1 2"},
        {"role": "assistant", "content": "3"},
        {"role": "user", "content": "4"},
        {"role": "assistant", "content": "5 6"},
    ]
    [row] = read(tmp_path, {"messages": turns}, tokenizer=Turns())
    assert row.tokens.tolist() == [4, 1, 2, 50, 9, 3, 50, 4, 4, 50, 9, 5, 6, 50]
    assert row.tokens[row.learned].tolist() == [3, 50, 5, 6, 50]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{not json", r"line 2 is not JSON"),
        ({"text": "1"}, r"line 2 has none of: tokens; messages; prompt and response"),
        ("[1, 2]", r"line 2 has none of"),
        ({"tokens": [1.5, 2.0]}, r"line 2: `tokens` must be a list of at least two integers"),
        ({"tokens": [1]}, r"line 2: `tokens` must be a list of at least two integers"),
        ({"tokens": [1, 2], "loss_mask": [1]}, r"line 2: `loss_mask` has 1 entries for 2 tokens"),
        ({"prompt": "hello", "response": "1"}, r"line 2: the tokenizer cannot read text; pass --tokenizer-type"),
        ({"prompt": 3, "response": "1"}, r"line 2: 3 is not text"),
        ({"messages": []}, r"line 2 has `messages`, but the tokenizer has no chat template"),
    ],
)
def test_a_line_that_cannot_be_used_is_named(tmp_path: Path, line: object, message: str) -> None:
    with pytest.raises(BalanceError, match=message):
        read(tmp_path, {"tokens": [1, 2]}, line)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(BalanceError, match="there is no such file"):
        list(jsonl_samples(tmp_path / "none.jsonl", Numbers()))
