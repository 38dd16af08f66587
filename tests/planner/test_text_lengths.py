"""Counting the tokens of texts and conversations, with a tokenizer whose tokens are words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_balance.errors import BalanceError
from megatron_balance.lengths.text import count_text_tokens

tokenizers = pytest.importorskip("tokenizers")


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    """A folder with a tokenizer of words that cuts at 4, adds [BOS] to a text, and pads."""
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"[UNK]": 0, "[BOS]": 1}, unk_token="[UNK]"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    words.post_processor = tokenizers.processors.TemplateProcessing(
        single="[BOS] $A", pair="[BOS] $A $B", special_tokens=[("[BOS]", 1)]
    )
    words.enable_truncation(4)
    words.enable_padding(length=3)
    words.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def write_jsonl(folder: Path, *records: Any) -> Path:
    file = folder / "data.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return file


def test_texts_are_counted_whole_with_their_special_tokens(tokenizer: Path) -> None:
    file = write_jsonl(tokenizer, {"text": "a b c d e f"}, {"text": ""}, {"text": "a"})
    assert count_text_tokens(file, tokenizer=tokenizer).tolist() == [7, 1, 2]


def test_messages_are_counted_with_their_marks(tokenizer: Path) -> None:
    messages = [{"role": "user", "content": "a b"}, {"role": "assistant", "content": "c d e f g"}]
    parts = [{"type": "text", "text": "a b "}, {"type": "image"}, {"type": "text", "text": "c"}]
    file = write_jsonl(
        tokenizer,
        {"messages": messages},
        {"messages": [{"role": "user", "content": parts}]},
        {"messages": [{"role": "assistant", "content": None, "tool_calls": []}]},
        {"messages": []},
    )
    assert count_text_tokens(file, tokenizer=tokenizer).tolist() == [2 + 5 + 10, 3 + 5, 5, 0]
    assert count_text_tokens(file, tokenizer=tokenizer, tokens_per_message=0).tolist() == [7, 3, 0, 0]


def test_other_names_of_fields(tokenizer: Path) -> None:
    file = write_jsonl(tokenizer, {"conversations": [{"from": "human", "value": "a b"}]}, {"text": "a"})
    assert count_text_tokens(file, tokenizer=tokenizer).tolist() == [7, 2]
    file = write_jsonl(tokenizer, {"body": "a b", "text": "a"})
    assert count_text_tokens(file, tokenizer=tokenizer, key="body").tolist() == [3]


def test_the_order_survives_batches_and_mixtures_and_progress_ends_at_the_end(tokenizer: Path) -> None:
    records = [
        {"text": "a " * (index % 7)} if index % 3 else {"messages": [{"content": "a " * (index % 5)}]}
        for index in range(3000)
    ]
    file = write_jsonl(tokenizer, *records)
    seen: list[tuple[int, int]] = []
    lengths = count_text_tokens(file, tokenizer=tokenizer, progress=lambda done, total: seen.append((done, total)))
    assert lengths.tolist() == [index % 7 + 1 if index % 3 else index % 5 + 5 for index in range(3000)]
    size = file.stat().st_size
    assert len(seen) == 3
    assert seen[-1] == (size, size)


def test_parquet_holds_the_same(tokenizer: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    messages = [[{"role": "user", "content": "a b"}], [{"role": "user", "content": "a"}] * 2]
    parquet.write_table(pyarrow.table({"id": [1, 2], "messages": messages}), tokenizer / "data.parquet")
    seen: list[tuple[int, int]] = []
    lengths = count_text_tokens(
        tokenizer / "data.parquet", tokenizer=tokenizer, progress=lambda done, total: seen.append((done, total))
    )
    assert lengths.tolist() == [7, 12]
    assert seen == [(2, 2)]


def test_what_cannot_be_counted_is_named(tokenizer: Path, tmp_path: Path) -> None:
    def refused(file: Path, match: str, **flags: Any) -> None:
        with pytest.raises(BalanceError, match=match):
            count_text_tokens(file, **{"tokenizer": tokenizer, **flags})

    refused(write_jsonl(tmp_path, {"text": "a"}, {"body": "a"}), "line 2 has no field .* it has body.*--text-key")
    refused(write_jsonl(tmp_path, {"text": 7}), "line 1: it holds int")
    refused(write_jsonl(tmp_path, {"messages": [{"content": 7}]}), "line 1: a message's content is int")
    refused(write_jsonl(tmp_path), "holds no records")
    refused(tmp_path / "missing.jsonl", "does not exist")
    refused(tmp_path / "data.csv", r"not from '.csv' files")
    file = write_jsonl(tmp_path, {"text": "a"})
    refused(file, "--tokens-per-message is -1", tokens_per_message=-1)
    refused(file, "--tokenizer is", tokenizer=tmp_path / "nowhere")
    refused(file, "no Hugging Face tokenizer.json", tokenizer=_json_file(tmp_path, "{}"))
    refused(file, "--tokenizer is", tokenizer=_json_file(tmp_path, "not JSON"))
    file.write_text("{\n")
    refused(file, "line 1 is not JSON")
    file.write_bytes(b'{"text": "\xff"}\n')
    refused(file, "is not UTF-8")
    (tmp_path / "broken.parquet").write_text("no parquet")
    refused(tmp_path / "broken.parquet", "is not a parquet file")


def _json_file(folder: Path, text: str) -> Path:
    file = folder / "other.json"
    file.write_text(text)
    return file
