"""Files of someone else's: damaged, absurd, or made to harm. Each ends in one line and exit status 2; nothing runs.

What is run is the command itself, on real files; then hypothesis feeds bytes to every reader.
"""

import contextlib
import io
import json
import pickle
import re
import tracemalloc
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from recorded_runs import run_info, write_record

import megatron_balance
from megatron_balance import BalanceError, CostModel, Limits, ModelShape, Topology
from megatron_balance.cli import main
from megatron_balance.cost.calibration import Calibration
from megatron_balance.lengths import read, read_lengths
from megatron_balance.record import read_record

FLAGS = ["--data", "samples", "--global-batch-size", "4", "--dp-size", "2", "--max-tokens-per-gpu", "2048"]


@pytest.fixture
def refused(capsys):
    def refused(*words):
        """The one line that a command says where it ends with status 2."""
        assert main([*map(str, words)]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("megatron-balance: ")
        assert len(line) < 2000
        return line

    return refused


class Bomb:
    """Unpickled, it leaves a file behind."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return Path.touch, (self.mark,)


@pytest.mark.parametrize("name", ["lengths.npy", "pickle.npy"])
def test_pickled_objects_are_not_loaded(name, tmp_path, refused):
    mark, path = tmp_path / "it ran", tmp_path / name
    objects = np.array([Bomb(mark)], dtype=object)
    if name == "lengths.npy":
        np.save(path, objects, allow_pickle=True)
    else:
        path.write_bytes(pickle.dumps(Bomb(mark)))
    assert str(path) in refused("compare", path, *FLAGS)
    assert not mark.exists()
    # The file is what it is said to be: whoever trusts it is hit.
    np.load(path, allow_pickle=True)
    assert mark.exists()


def array_of(claimed):
    """An .npy file of eight numbers whose header claims more."""
    stream = io.BytesIO()
    np.lib.format.write_array_header_1_0(stream, {"descr": "<i8", "fortran_order": False, "shape": (claimed,)})
    return stream.getvalue() + b"\0" * 64


def calibration(held_out_error=None, origin=(), **changes):
    costs = asdict(CostModel(linear=10**12)) | changes
    content = {"held_out_error": held_out_error, "attoseconds": costs, "origin": origin}
    return json.dumps({"format": "megatron_balance calibration 2", **content}).encode()


def hf_config(**changes):
    fields = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 100}
    return json.dumps({"model_type": "llama", "intermediate_size": 128, **fields, **changes}).encode()


def test_the_files_are_good_before_they_are_spoilt(tmp_path):
    for name, content in (("--cost", calibration()), ("--model", hf_config())):
        path = tmp_path / f"{name}.json"
        path.write_bytes(content)
        assert main(["compare", "synthetic:gsm8k_sft:8", *FLAGS, name, str(path)]) == 0


@pytest.mark.parametrize(
    ("what", "content"),
    [
        ("claims.npy", array_of(10**12)),
        ("huge.jsonl", b"9" * 5000),
        ("infinite.jsonl", b'{"length": 1e999}'),
        ("names.jsonl", json.dumps({f"{at}" * 99: 1 for at in range(999)}).encode()),
        ("nul.txt", b"1\0\n"),
        ("deep.jsonl", b"[" * 100_000),
        ("--cost", b"[" * 100_000),
        ("--model", b"[" * 100_000),
        ("--model", hf_config(full_attention_interval=10**10)),
        ("--model", hf_config(hybrid_override_pattern="M" * 10**6)),
        ("--model", hf_config(layer_types=["sliding_attention"] * 2, sliding_window=10**30)),
        ("--cost", b"\xed\xa0\x80"),
        ("--cost", calibration(quadratic=1.5)),
        ("--cost", calibration(windows=[[float("inf"), 1]])),
        ("--cost", calibration(origin=[1])),
        ("--model", hf_config(model_type="../../etc/passwd", vocab_size=None)),
        ("--model", hf_config(num_hidden_layers=10**9)),
        ("--model", hf_config(layer_types=["sliding_attention"], sliding_window="wide")),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_lengths_costs_and_models(what, content, tmp_path, refused):
    path = tmp_path / (f"{what}.json" if what.startswith("-") else what)
    path.write_bytes(content)
    assert path.stat().st_size < 2**22
    lengths = ["synthetic:gsm8k_sft:8", what, path] if what.startswith("-") else [path]
    line = refused("compare", *lengths, *FLAGS)
    assert str(path) in line or what == "--model"


def test_no_more_is_read_than_is_asked_for_and_no_more_unpacked_than_a_limit(tmp_path):
    """A column of one value is a small file, however long."""
    parquet, table = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("pyarrow").table
    bomb, lines = tmp_path / "bomb.parquet", tmp_path / "lines.txt"
    parquet.write_table(table({"length": np.ones(2**21, dtype=np.uint8)}), bomb)
    lines.write_bytes(b"1\n" * 2**21)
    tracemalloc.start()
    for path in (bomb, lines):
        assert read_lengths(path, limit=8).tolist() == [1] * 8
    assert tracemalloc.get_traced_memory()[1] < 2**24
    tracemalloc.stop()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(read, "MAX_LENGTHS", 2**12)
        with pytest.raises(BalanceError, match="more than 4096 lengths: leave out --shuffle"):
            read_lengths(bomb)


def spoil(content, where, value):
    """A copy with another value at a place, or with what a function makes of the value there."""
    if not where:
        return value(content) if callable(value) else value
    copied = dict(content) if isinstance(content, dict) else list(content)
    copied[where[0]] = spoil(copied.get(where[0]) if isinstance(copied, dict) else 0, where[1:], value)
    return copied


@pytest.mark.parametrize(
    ("file", "number", "where", "value", "said"),
    [
        ("plan", 0, (), [], "line 1 is damaged"),
        ("plan", 1, (), "DEEP", "line 2 is damaged (RecursionError"),
        ("plan", 0, ("topology", "pp_size"), 10**8, "100000000 pipeline stages"),
        ("plan", 0, ("cost_model", "linear"), 10**400, ""),
        ("plan", 0, ("format",), "another", "not 'megatron_balance record 4': install the version that wrote it"),
        ("plan", 0, ("topology", "dp_size"), 10**12, "damaged"),
        ("plan", 0, ("limits", "max_tokens_per_gpu"), "many", "max_tokens_per_gpu"),
        ("plan", 0, ("cost_model", "linear"), 1.5, "linear"),
        ("plan", 0, ("cost_model", "windows"), [[1, 2, 3]], "damaged"),
        ("plan", 0, ("objective",), "</script>", "objective"),
        ("plan", 1, ("microbatch_of",), [10**9] * 6, "microbatch_of"),
        ("plan", 1, ("home_ranks",), [7] * 6, "home"),
        ("plan", 1, ("num_segments",), [10**15] * 6, "damaged"),
        ("plan", 1, ("segment_lengths", 0), 2**70, "damaged"),
        ("plan", 1, ("iteration",), 0, "iteration is 0"),
        ("plan", 1, ("cp_sizes",), lambda sizes: sizes[:-1], "cannot reshape"),
        ("plan", 1, ("cp_sizes",), lambda sizes: [{2: 3}.get(size, size) for size in sizes], "none of"),
        ("plan", 1, ("cp_sizes",), lambda sizes: [0] * len(sizes), "or 0 where a sample is"),
        ("plan", 1, ("cp_sizes",), None, "cp_sizes has shape ()"),
        ("plan", 0, ("topology", "dynamic_cp"), False, "cp_sizes has a size that is none of (1,)"),
        ("seconds_rank00001", 0, ("seconds",), ["a", "b"], "line 1 is damaged"),
        ("seconds_rank00001", 0, ("seconds", 0), -1.0, "below 0"),
        ("seconds_rank00001", 0, ("rank",), -1, "rank is -1"),
    ],
)
def test_lines_of_a_record(file, number, where, value, said, tmp_path, refused):
    info = run_info(Topology(4, dynamic_cp=True), limits=Limits(2048))
    write_record(tmp_path, info, num_steps=2, num_samples=6)
    path = tmp_path / f"{file}.jsonl"
    lines = path.read_text().splitlines()
    lines[number] = "[" * 100_000 if value == "DEEP" else json.dumps(spoil(json.loads(lines[number]), where, value))
    path.write_text("\n".join(lines) + "\n")
    line = refused("report", tmp_path, "--out", tmp_path / "page.html")
    assert str(tmp_path) in line or not said
    assert said in line


def test_nothing_of_a_record_reaches_the_terminal_unescaped(tmp_path, capsys):
    """Fault: titles, screens and the flags that users copy could be forged."""
    write_record(tmp_path, run_info(policy="\x1b[2J\x1b[31mHACK\x07\n  by-flops  --rm" + "x" * 10**6), num_steps=1)
    assert main(["compare", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert r"\x1b[2J\x1b[31mHACK\x07 by-flops --rm" in printed
    assert "\x1b" not in printed
    assert len(printed) < 10_000


def test_outputs_replace_no_input(tmp_path, refused):
    lengths, record, page = tmp_path / "clob.npy", tmp_path / "record", tmp_path / "notes.html"
    np.save(lengths, np.full(8, 100))
    write_record(record, num_steps=3)
    page.write_text("mine")
    link, target = tmp_path / "out.json", tmp_path / "target.json"
    link.symlink_to(target)
    before = lengths.read_bytes(), (record / "plan.jsonl").read_bytes()
    assert "not an earlier output" in refused("compare", lengths, *FLAGS, "--json", lengths)
    assert "an input of this command: name another file" in refused("report", record, "--out", record / "plan.jsonl")
    assert "not an earlier output" in refused("fit", record, "--out", record / "seconds_rank00000.jsonl")
    assert "not an earlier output" in refused("report", record, "--out", page)
    refused("compare", tmp_path / "missing.npy", *FLAGS, "--json", link)
    assert (lengths.read_bytes(), (record / "plan.jsonl").read_bytes()) == before
    assert link.is_symlink()
    assert not target.exists()
    for _ in range(2):  # an earlier output is replaced
        assert main(["compare", str(lengths), *FLAGS, "--json", str(link)]) == 0
        assert main(["report", str(record), "--out", str(tmp_path / "a.html")]) == 0
        assert main(["fit", str(record), "--out", str(tmp_path / "seconds.json")]) == 0
    assert target.stat().st_size


BYTES = st.binary(max_size=200) | st.text(max_size=100).map(lambda text: text.encode("utf-8", "surrogatepass"))
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=12,
)


def with_a_field(make, *names):
    """A good file but for one field."""
    return st.builds(lambda name, value: make(**{name: value}), st.sampled_from(names), JSON)


LINES = BYTES | JSON.map(lambda value: json.dumps(value).encode() + b"\n")
CALIBRATIONS = with_a_field(calibration, "linear", "windows", "per_sequence", "held_out_error", "origin")
CONFIGS = with_a_field(hf_config, *json.loads(hf_config()))


@pytest.mark.parametrize(
    ("read", "suffix", "contents"),
    [
        *((read_lengths, suffix, BYTES) for suffix in ("npy", "jsonl", "idx")),
        (read_record, "jsonl", LINES),
        (Calibration.read, "json", LINES | CALIBRATIONS),
        (ModelShape.from_hf_config, "json", LINES | CONFIGS),
    ],
)
@pytest.mark.filterwarnings("ignore:model_type")
@given(data=st.data())
def test_any_bytes_and_any_values(read, suffix, contents, data, tmp_path_factory):
    path = tmp_path_factory.getbasetemp() / f"any.{suffix}"
    path.write_bytes(data.draw(contents))
    with contextlib.suppress(BalanceError):
        read(path)


SAFE = {"numpy": "allow_pickle=False", "np": "allow_pickle=False", "torch": "weights_only=True"}


def unpickles(source):
    """Calls that unpickle, beyond those that ruff's S rules see: collectives of objects do, and `load` by default."""
    found = re.findall(r"\w+_object(?:_list)?\b(?=\()|from (?:numpy|torch) import .*\bload\b", source)
    loads = re.findall(r"\b(numpy|np|torch)\.load\((.*)", source)
    return found + [f"{module}.load({said}" for module, said in loads if SAFE[module] not in said]


def test_no_file_of_the_package_unpickles():
    files = sorted(Path(megatron_balance.__path__[0]).rglob("*.py"))
    assert len(files) > 60
    calls = {file.name: found for file in files if (found := unpickles(file.read_text(encoding="utf-8")))}
    # AReaL's trajectories, which AReaL itself sends so, and what ranks of a run find for auto settings.
    of_ranks = {"areal.py": ["all_gather_object"], "autotune.py": ["all_gather_object", "broadcast_object_list"]}
    assert calls == of_ranks
    for source in (
        "np.load(path)",
        "numpy.load(path, allow_pickle=True)",
        "from numpy import load",
        "torch.load(path, weights_only=False)",
        "dist.all_gather_object(out, 1)",
        "broadcast_object_list(parts)",
    ):
        assert unpickles(source), source
