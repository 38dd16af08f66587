"""Counts the tokens of each record of a text data set.

A record holds a text, or messages of a conversation. Of messages the contents are tokenized and `tokens_per_message`
added for each, for the role and the marks around it. What a chat template adds beyond that (a system prompt of its
own, tools) is not counted.

Invariants: lengths are in the order of records; a record that cannot be counted is named by its line or row.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from megatron_balance.errors import BalanceError
from megatron_balance.files.untrusted import parse_json
from megatron_balance.lengths.parquet import open_parquet
from megatron_balance.lengths.records import choose_field, json_lines

TEXT_KEYS = ("messages", "conversations", "text")
"""Default fields of a text or a conversation, in order of preference."""

TOKENS_PER_MESSAGE = 5
"""ChatML around a message: start, role, newline, end, newline."""

_BATCH = 1024
"""Records that are tokenized at a time."""

Progress = Callable[[int, int], None]
"""Called with the amount done and the total: bytes of a jsonl file, rows of a parquet file."""

_Record = tuple[str, object, int]
"""Place in the file, text or messages, and the amount done once it is read."""


def count_text_tokens(
    path: str | Path,
    *,
    tokenizer: str | Path,
    key: str | None = None,
    tokens_per_message: int = TOKENS_PER_MESSAGE,
    progress: Progress | None = None,
) -> NDArray[np.int64]:
    """Tokenize a data set and count the tokens of each record.

    Args:
        path: `.jsonl` with an object a line, or `.parquet` (needs pyarrow).
        tokenizer: a Hugging Face `tokenizer.json`, or the folder that holds it (needs tokenizers).
        key: field or column of the text or the messages; by default the first of `TEXT_KEYS` that exists.
        tokens_per_message: added to every message of a conversation.
        progress: called now and then with the progress.

    Returns:
        `[num_records]` int64, tokens. Special tokens that the tokenizer adds to a text are counted.

    Raises:
        BalanceError: a file is missing or is no such file, a package is missing, or a record holds no text.
    """
    if tokens_per_message < 0:
        raise BalanceError(f"--tokens-per-message is {tokens_per_message}: it must be 0 or more.")
    file = Path(path)
    reader = _READERS.get(file.suffix.lower())
    if reader is None:
        raise BalanceError(
            f"{file}: --tokenizer reads texts from {' or '.join(_READERS)}, not from {file.suffix!r} files."
        )
    if not file.is_file():
        raise BalanceError(f"{file} does not exist; give a data set in {' or '.join(_READERS)}.")
    encoder = _Encoder(tokenizer, tokens_per_message=tokens_per_message)
    lengths: list[int] = []
    batch: list[_Record] = []
    total, records = reader(file, key)

    def count_batch() -> None:
        lengths.extend(encoder.count(batch, file=file))
        if progress is not None and batch:
            progress(batch[-1][2], total)
        batch.clear()

    try:
        for record in records:
            batch.append(record)
            if len(batch) == _BATCH:
                count_batch()
    except UnicodeDecodeError as error:
        raise BalanceError(f"{file} is not UTF-8 text (byte {error.start}); save it as UTF-8.") from error
    except OSError as error:
        raise BalanceError(f"{file} cannot be read: {error.strerror or error}.") from error
    count_batch()
    if not lengths:
        raise BalanceError(f"{file} holds no records; it needs at least one sample.")
    return np.array(lengths, dtype=np.int64)


class _Encoder:
    """Counts the tokens of texts and of conversations."""

    def __init__(self, tokenizer: str | Path, *, tokens_per_message: int) -> None:
        self._tokenizer = _load(Path(tokenizer))
        self._tokens_per_message = tokens_per_message

    def count(self, records: list[_Record], *, file: Path) -> list[int]:
        """Tokens of each record."""
        texts: list[str] = []
        conversations: list[list[str]] = []
        for place, value, _ in records:
            if isinstance(value, str):
                texts.append(value)
            else:
                conversations.append(_contents(value, where=f"{file}, {place}"))
        of_texts = iter(self._lengths(texts, special=True))
        of_messages = iter(self._lengths([text for messages in conversations for text in messages], special=False))
        sizes = iter([len(messages) for messages in conversations])
        counts: list[int] = []
        for _, value, _ in records:
            if isinstance(value, str):
                counts.append(next(of_texts))
            else:
                counts.append(sum(next(of_messages) + self._tokens_per_message for _ in range(next(sizes))))
        return counts

    def _lengths(self, texts: list[str], *, special: bool) -> list[int]:
        return [len(encoding.ids) for encoding in self._tokenizer.encode_batch(texts, add_special_tokens=special)]


def _load(path: Path) -> Any:
    """A tokenizer that neither cuts nor pads."""
    file = path / "tokenizer.json" if path.is_dir() else path
    try:
        package = importlib.import_module("tokenizers")
    except ImportError as error:
        raise BalanceError(
            "--tokenizer needs the package tokenizers; install it with `pip install 'megatron-balance[text]'`."
        ) from error
    try:
        content = parse_json(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BalanceError(
            f"--tokenizer is {str(path)!r}: {error}. It must be a Hugging Face tokenizer.json, or a folder with one; "
            "transformers' AutoTokenizer.from_pretrained(...).save_pretrained(folder) writes it."
        ) from error
    if not isinstance(content, dict) or "model" not in content:
        raise BalanceError(f"--tokenizer is {str(path)!r}: it is JSON, but no Hugging Face tokenizer.json.")
    try:
        tokenizer = package.Tokenizer.from_file(str(file))
    except Exception as error:
        if type(error) is not Exception:  # for errors of the file the package raises the bare class
            raise
        raise BalanceError(f"--tokenizer is {str(path)!r}: the package tokenizers cannot read it: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _contents(value: object, *, where: str) -> list[str]:
    """The texts of a conversation's messages; of several parts, the texts among them joined."""
    if not isinstance(value, list):
        raise BalanceError(f"{where}: it holds {type(value).__name__}, neither a text nor a list of messages.")
    texts: list[str] = []
    for message in cast("list[object]", value):
        content: object = message
        if isinstance(message, Mapping):
            fields = cast("Mapping[str, object]", message)
            content = fields["content"] if "content" in fields else fields.get("value")
        if isinstance(content, list):
            parts = [cast("Mapping[str, object]", p) for p in cast("list[object]", content) if isinstance(p, Mapping)]
            content = "".join(str(part["text"]) for part in parts if part.get("text") is not None)
        # A message that only calls a tool has no content.
        if content is not None and not isinstance(content, str):
            raise BalanceError(f"{where}: a message's content is {type(content).__name__}; it must be a text.")
        texts.append(content or "")
    return texts


def _choose(names: list[str], *, key: str | None, where: str) -> str:
    remedy = "Name the text or the messages with --text-key."
    return choose_field(names, wanted=TEXT_KEYS if key is None else (key,), where=where, remedy=remedy)


def _read_jsonl(file: Path, key: str | None) -> tuple[int, Iterator[_Record]]:
    def records() -> Iterator[_Record]:
        for number, value, done in json_lines(file, holds="object"):
            if isinstance(value, dict):
                fields = cast("dict[str, object]", value)
                value = fields[_choose(list(fields), key=key, where=f"{file}, line {number}")]
            yield f"line {number}", value, done

    return file.stat().st_size, records()


def _read_parquet(file: Path, key: str | None) -> tuple[int, Iterator[_Record]]:
    with open_parquet(file, extra="text") as table:
        name = _choose(list(table.schema_arrow.names), key=key, where=str(file))
        num_rows = int(table.metadata.num_rows)

    def records() -> Iterator[_Record]:
        row = 0
        with open_parquet(file, extra="text") as table:
            for batch in table.iter_batches(columns=[name], batch_size=_BATCH):
                for value in batch.column(0).to_pylist():
                    row += 1
                    yield f"row {row - 1}", value, row

    return num_rows, records()


_READERS: dict[str, Callable[[Path, str | None], tuple[int, Iterator[_Record]]]] = {
    ".jsonl": _read_jsonl,
    ".parquet": _read_parquet,
}
