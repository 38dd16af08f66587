"""Files of someone else's: damaged, absurd, or made to harm. Each ends in one line and exit status 2; nothing runs.

What is run is the command itself, on real files; then hypothesis feeds bytes to every reader.
"""

from __future__ import annotations

import contextlib
import io
import json
import pickle
import re
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from recorded_runs import run_info, write_record

import megatron_balance
from megatron_balance import BalanceError, ModelShape, Topology
from megatron_balance.cli import main
from megatron_balance.cost import Calibration
from megatron_balance.lengths import read_lengths
from megatron_balance.record import read_record

FLAGS = ["--global-batch-size", "4", "--dp-size", "2", "--max-tokens-per-gpu", "2048"]


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The one line that a command says where it ends with status 2."""
    assert main([*words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("megatron-balance: ")
    assert len(line) < 2000
    return line


class Bomb:
    """Unpickled, it leaves a file behind."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.mark,)


@pytest.mark.parametrize("name", ["lengths.npy", "lengths.npz", "pickle.npy"])
def test_pickled_objects_are_not_loaded(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mark, path = tmp_path / "it ran", tmp_path / name
    objects = np.array([Bomb(mark)], dtype=object)
    if name == "lengths.npz":
        np.savez(path, length=objects)
    elif name == "lengths.npy":
        np.save(path, objects, allow_pickle=True)
    else:
        path.write_bytes(pickle.dumps(Bomb(mark)))
    assert str(path) in refused(capsys, "compare", str(path), *FLAGS)
    assert not mark.exists()
    # The file is what it is said to be: whoever trusts it is hit.
    np.load(path, allow_pickle=True)["length"] if name == "lengths.npz" else np.load(path, allow_pickle=True)
    assert mark.exists()


def array_of(claimed: int) -> bytes:
    """An .npy file of eight numbers whose header claims more."""
    stream = io.BytesIO()
    np.lib.format.write_array_header_1_0(stream, {"descr": "<i8", "fortran_order": False, "shape": (claimed,)})
    return stream.getvalue() + b"\0" * 64


def archive_of(content: bytes, *, claimed: int | None = None) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("length.npy", content)
        archive.filelist[0].file_size = claimed or len(content)
    return stream.getvalue()


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("claims.npy", lambda: array_of(10**12)),
        ("claims.npz", lambda: archive_of(array_of(10**12))),
        ("unpacks to 2281701376.npz", lambda: archive_of(array_of(8), claimed=2281701376)),
        ("huge.jsonl", lambda: b"9" * 5000),
        ("infinite.jsonl", lambda: b'{"length": 1e999}'),
        ("nested.jsonl", lambda: b'{"length": {"length": 3}}'),
        ("names.jsonl", lambda: json.dumps({f"{at}" * 99: 1 for at in range(999)}).encode()),
        ("quote.csv", lambda: b'length\n"' + b"1\n" * 200_000),
        ("nul.csv", lambda: b"length\n1\0\n"),
        ("exponent.txt", lambda: b"1e400"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_lengths(name: str, content: Callable[[], bytes], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / name
    path.write_bytes(content())
    assert path.stat().st_size < 2**22
    line = refused(capsys, "compare", str(path), *FLAGS)
    assert str(path) in line
    assert path.stem in line.replace(str(path), "") or not path.stem.startswith("unpacks")


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
    ("flag", "content"),
    [
        ("--cost", "[]"),
        ("--cost", "\ud800"),
        ("--cost", calibration(linear="1e-6")),
        ("--cost", calibration(quadratic=float("inf"))),
        ("--cost", calibration(windows=[[float("inf"), 1.0]])),
        ("--cost", calibration(origin=[1])),
        ("--model", "null"),
        ("--model", hf_config(model_type="../../etc/passwd", vocab_size=None)),
        ("--model", hf_config(hidden_size=-64)),
        ("--model", hf_config(num_hidden_layers=10**9)),
        ("--model", hf_config(layer_types=["sliding_attention"], sliding_window="wide")),
    ],
)
def test_costs_and_models(flag: str, content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "file.json"
    path.write_bytes(content.encode("utf-8", "surrogatepass"))
    refused(capsys, "compare", "synthetic:gsm8k_sft:8", *FLAGS, flag, str(path))


@pytest.fixture
def record(tmp_path: Path) -> Path:
    """As a training run writes it: two steps of two ranks, measured."""
    write_record(tmp_path / "record", run_info(Topology(2)), num_steps=2, num_samples=6)
    return tmp_path / "record"


def spoil(content: Any, where: tuple[Any, ...], value: Any) -> Any:
    """A copy with another value at a place."""
    if not where:
        return value
    copied = dict(content) if isinstance(content, dict) else list(content)
    copied[where[0]] = spoil(copied.get(where[0]) if isinstance(copied, dict) else 0, where[1:], value)
    return copied


@pytest.mark.parametrize(
    ("file", "number", "where", "value"),
    [
        ("plan", 0, (), []),
        ("plan", 0, ("format",), "another"),
        ("plan", 0, ("topology",), [2]),
        ("plan", 0, ("topology", "dp_size"), 10**12),
        ("plan", 0, ("limits", "max_tokens_per_gpu"), "many"),
        ("plan", 0, ("cost_model", "linear"), 1.5),
        ("plan", 0, ("cost_model", "windows"), [[1, 2, 3]]),
        ("plan", 0, ("objective",), "</script>"),
        ("plan", 0, ("origin",), "here"),
        ("plan", 1, (), 7),
        ("plan", 1, ("slot_of",), [10**9] * 6),
        ("plan", 1, ("slot_of",), [0, 0]),
        ("plan", 1, ("home_ranks",), [7] * 6),
        ("plan", 1, ("num_segments",), [10**15] * 6),
        ("plan", 1, ("segment_lengths", 0), 2**70),
        ("plan", 1, ("segment_lengths", 0), 1.5),
        ("plan", 1, ("num_microbatches",), 10**12),
        ("plan", 1, ("cost_shift",), 10**9),
        ("plan", 1, ("cost_model",), "[" * 100_000),
        ("plan", 1, ("plan_seconds",), float("inf")),
        ("plan", 1, ("iteration",), {}),
        ("plan", 1, ("cp_sizes",), [1, 1]),
        ("seconds_rank00001", 0, ("seconds",), ["a", "b"]),
        ("seconds_rank00001", 0, ("seconds", 0), -1.0),
        ("seconds_rank00001", 0, ("seconds",), [[1.0]]),
        ("seconds_rank00001", 0, ("rank",), -1),
    ],
)
def test_lines_of_a_record(
    file: str, number: int, where: tuple[Any, ...], value: Any, record: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = record / f"{file}.jsonl"
    lines = path.read_text().splitlines()
    lines[number] = json.dumps(spoil(json.loads(lines[number]), where, value))
    path.write_text("\n".join(lines) + "\n")
    assert str(record) in refused(capsys, "report", str(record), "--out", str(record / "page.html"))


def test_texts_of_a_record_stay_texts_in_the_page(record: Path) -> None:
    pytest.importorskip("plotly")
    path = record / "plan.jsonl"
    harm = "</script><script>alert(1)</script><img src=x onerror=alert(1)>\"'"
    first, *others = path.read_text().splitlines()
    content = json.loads(first)
    content["policy"] = content["cost_name"] = harm
    content["origin"] = {"device": harm, "clock": harm, "versions": {harm: harm}}
    path.write_text("\n".join([json.dumps(content), *others]) + "\n")
    out = record / "page.html"
    assert main(["report", str(record), "--out", str(out)]) == 0
    page = out.read_text()
    assert "alert(1)" in page
    assert "<script>alert" not in page
    assert "<img src=x" not in page


BYTES = st.binary(max_size=200) | st.text(max_size=100).map(lambda text: text.encode("utf-8", "surrogatepass"))
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=12,
)
FIELDS = {
    Calibration.read: (calibration, ["linear", "windows", "held_out_error", "origin"]),
    ModelShape.from_hf_config: (hf_config, sorted(json.loads(hf_config()))),
}


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz")


@pytest.mark.parametrize("suffix", ["npy", "npz", "jsonl", "csv", "txt", "idx"])
@given(content=BYTES)
def test_any_bytes_as_lengths(suffix: str, content: bytes, scratch: Path) -> None:
    path = scratch / f"lengths.{suffix}"
    path.write_bytes(content)
    with contextlib.suppress(BalanceError):
        read_lengths(path)


@pytest.mark.parametrize("read", [*FIELDS, read_record])
@given(data=st.data(), value=JSON)
def test_any_bytes_and_any_values_as_json(
    read: Callable[[Path], object], data: st.DataObject, value: Any, scratch: Path
) -> None:
    contents = BYTES | st.just(json.dumps(value).encode() + b"\n")
    if read in FIELDS:
        make, names = FIELDS[read]
        contents |= st.sampled_from(names).map(lambda name: make(**{name: value}).encode())
    path = scratch / "any.json"
    path.write_bytes(data.draw(contents))
    with contextlib.suppress(BalanceError):
        read(path)


SAFE = {"numpy": "allow_pickle=False", "np": "allow_pickle=False", "torch": "weights_only=True"}


def unpickles(source: str) -> list[str]:
    """Calls that unpickle, beyond those that ruff's S rules see: collectives of objects do, and `load` by default."""
    found = re.findall(r"\w+_object(?:_list)?\b(?=\()|from (?:numpy|torch) import .*\bload\b", source)
    loads = re.findall(r"\b(numpy|np|torch)\.load\((.*)", source)
    return found + [f"{module}.load({said}" for module, said in loads if SAFE[module] not in said]


def test_no_file_of_the_package_unpickles() -> None:
    files = sorted(Path(megatron_balance.__path__[0]).rglob("*.py"))
    assert len(files) > 60
    assert not {file.name: calls for file in files if (calls := unpickles(file.read_text(encoding="utf-8")))}
    for source in (
        "np.load(path)",
        "numpy.load(path, allow_pickle=True)",
        "from numpy import load",
        "torch.load(path, weights_only=False)",
        "dist.all_gather_object(out, 1)",
        "broadcast_object_list(parts)",
    ):
        assert unpickles(source), source
