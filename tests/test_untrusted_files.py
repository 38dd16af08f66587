"""Files of someone else's: damaged, absurd, or made to harm. Each ends in one line and exit status 2; nothing runs.

What is run is the command itself, on real files; then hypothesis feeds bytes to every reader.
"""

from __future__ import annotations

import contextlib
import io
import json
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_balance import BalanceError, ModelShape
from megatron_balance.cli import main
from megatron_balance.cost import Calibration
from megatron_balance.lengths import read_lengths
from megatron_balance.record import read_record

FLAGS = ["--global-batch-size", "4", "--dp-size", "2", "--max-tokens-per-gpu", "2048"]


class Bomb:
    """Unpickled, it leaves a file behind."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.mark,)


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The one line that a command says where it ends with status 2."""
    assert main([*words]) == 2
    output = capsys.readouterr()
    (line,) = output.err.splitlines()
    assert line.startswith("megatron-balance: ")
    assert len(line) < 2000
    return line


def npz_of(path: Path, **members: bytes) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name, content)


def npy_bytes(values: Any) -> bytes:
    stream = io.BytesIO()
    np.save(stream, values, allow_pickle=True)
    return stream.getvalue()


def npy_claiming(shape: tuple[int, ...], *, content: bytes) -> bytes:
    """An array whose header claims more bytes than there are."""
    stream = io.BytesIO()
    np.lib.format.write_array_header_1_0(stream, {"descr": "<i8", "fortran_order": False, "shape": shape})
    return stream.getvalue() + content


@pytest.mark.parametrize("name", ["lengths.npy", "lengths.npz", "pickle.npz", "pickle.npy"])
def test_pickled_objects_are_not_loaded(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mark = tmp_path / "it ran"
    path = tmp_path / name
    objects = np.array([Bomb(mark)], dtype=object)
    if name == "lengths.npz":
        np.savez(path, length=objects)
    else:
        path.write_bytes(npy_bytes(objects) if name == "lengths.npy" else pickle.dumps(Bomb(mark)))
    assert str(path) in refused(capsys, "compare", str(path), *FLAGS)
    assert not mark.exists()
    # The file is what it is said to be: whoever trusts it is hit.
    np.load(path, allow_pickle=True)["length"] if name == "lengths.npz" else np.load(path, allow_pickle=True)
    assert mark.exists()


@pytest.mark.parametrize("suffix", ["npy", "npz"])
def test_a_header_that_claims_more_than_there_is(
    suffix: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for claimed in (10**3, 10**12, 2**62):
        content = npy_claiming((claimed,), content=b"\0" * 64)
        path = tmp_path / f"claims{claimed}.{suffix}"
        if suffix == "npy":
            path.write_bytes(content)
        else:
            npz_of(path, **{"length.npy": content})
        assert str(path) in refused(capsys, "compare", str(path), *FLAGS)


def test_an_archive_that_unpacks_to_more_than_a_machine_holds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "bomb.npz"
    npz_of(path, **{f"{number}.npy": bytes(2**27) for number in range(17)})
    assert path.stat().st_size < 2**22
    assert "unpacks to 2281701376" in refused(capsys, "compare", str(path), *FLAGS)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("huge.jsonl", "9" * 5000),
        ("infinite.jsonl", '{"length": 1e999}'),
        ("nan.jsonl", "NaN"),
        ("list.jsonl", "[1, 2]"),
        ("nested.jsonl", '{"length": {"length": 3}}'),
        ("long.csv", "length\n" + "x" * 200_000),
        ("quote.csv", 'length\n"' + "1\n" * 200_000),
        ("nul.csv", "length\n1\0\n"),
        ("exponent.txt", "1e400"),
        ("underscores.txt", "1_" * 3000),
        ("binary.txt", "\x00\x01"),
    ],
)
def test_absurd_text(name: str, content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / name
    path.write_text(content)
    assert str(path) in refused(capsys, "compare", str(path), *FLAGS)


def calibration(**changes: Any) -> str:
    return json.dumps({"format": "megatron_balance calibration 1", "linear": 1e-6, "windows": [], **changes})


def hf_config(**changes: Any) -> str:
    fields = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 100}
    return json.dumps({"model_type": "llama", "intermediate_size": 128, **fields, **changes})


def test_the_files_are_good_before_they_are_spoilt(tmp_path: Path) -> None:
    (tmp_path / "calibration.json").write_text(calibration())
    (tmp_path / "config.json").write_text(hf_config())
    for cost in (["--cost", str(tmp_path / "calibration.json")], ["--model", str(tmp_path / "config.json")]):
        assert main(["compare", "synthetic:gsm8k_sft:8", *FLAGS, *cost]) == 0


@pytest.mark.parametrize(
    "content",
    [
        "[]",
        "\ud800".encode("utf-8", "surrogatepass"),
        calibration(linear="1e-6"),
        calibration(linear=-1),
        calibration(quadratic=float("inf")),
        calibration(per_sequence=float("nan")),
        calibration(windows=5),
        calibration(windows=[[1]]),
        calibration(windows=[[float("inf"), 1.0]]),
        calibration(windows=[[0, 1.0]]),
        calibration(origin=[1]),
        calibration(held_out_error="<script>"),
    ],
)
def test_calibration(content: str | bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "calibration.json"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    refused(capsys, "compare", "synthetic:gsm8k_sft:8", *FLAGS, "--cost", str(path))


@pytest.mark.parametrize(
    "content",
    [
        "null",
        hf_config(model_type=["llama"]),
        hf_config(model_type="../../etc/passwd", vocab_size=None),
        hf_config(hidden_size=-64),
        hf_config(hidden_size=6.4),
        hf_config(num_attention_heads=0),
        hf_config(num_hidden_layers=10**9),
        hf_config(layer_types=[{}]),
        hf_config(layer_types="full_attention"),
        hf_config(layer_types=["sliding_attention"], sliding_window="wide"),
        hf_config(text_config=3, model_type=None),
    ],
)
def test_hugging_face_config(content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "config.json"
    path.write_text(content)
    refused(capsys, "compare", "synthetic:gsm8k_sft:8", *FLAGS, "--model", str(path))


BYTES = st.binary(max_size=200) | st.text(max_size=100).map(lambda text: text.encode("utf-8", "surrogatepass"))
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=12,
)


def result_or_balance_error(read: Callable[[Path], object], path: Path) -> None:
    with contextlib.suppress(BalanceError):
        read(path)


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz")


@pytest.mark.parametrize("suffix", ["npy", "npz", "jsonl", "csv", "txt", "idx"])
@given(content=BYTES)
def test_any_bytes_as_lengths(suffix: str, content: bytes, scratch: Path) -> None:
    path = scratch / f"lengths.{suffix}"
    path.write_bytes(content)
    result_or_balance_error(read_lengths, path)


@given(content=BYTES | JSON.map(lambda value: json.dumps(value).encode()))
def test_any_bytes_as_json_files(content: bytes, scratch: Path) -> None:
    path = scratch / "any.json"
    path.write_bytes(content)
    for read in (Calibration.read, ModelShape.from_hf_config, read_record):
        result_or_balance_error(read, path)
    (scratch / "plan.jsonl").write_bytes(content + b"\n")
    result_or_balance_error(read_record, scratch)


@given(field=st.sampled_from(sorted(json.loads(hf_config()))), value=JSON)
def test_any_value_in_a_hugging_face_config(field: str, value: Any, scratch: Path) -> None:
    path = scratch / "config.json"
    path.write_text(hf_config(**{field: value}))
    result_or_balance_error(ModelShape.from_hf_config, path)


@given(field=st.sampled_from(["linear", "windows", "held_out_error", "origin", "measurements"]), value=JSON)
def test_any_value_in_a_calibration(field: str, value: Any, scratch: Path) -> None:
    path = scratch / "calibration.json"
    path.write_text(calibration(**{field: value}))
    result_or_balance_error(Calibration.read, path)
