"""Length files of every kind, and the named synthetic distributions."""

import json
import struct

import numpy as np
import pytest

from megatron_balance import BalanceError
from megatron_balance.lengths import MAX_LENGTH, SYNTHETIC_LENGTHS, read_lengths, read_rows, synthetic_lengths

LENGTHS = [512, 7, 0, 32768, 7]


def write(file, content):
    """Text, bytes or an array; a list is the column `length` of a parquet table."""
    if isinstance(content, str):
        file.write_text(content, encoding="utf-8")
    elif isinstance(content, bytes):
        file.write_bytes(content)
    elif isinstance(content, np.ndarray):
        np.save(file, content)
    else:
        table = pytest.importorskip("pyarrow").table({"length": content, "text": ["x"] * len(content)})
        pytest.importorskip("pyarrow.parquet").write_table(table, file)
    return file


CONTENTS = {
    ".npy": np.array(LENGTHS, dtype=np.int32),
    ".jsonl": "".join(json.dumps({"id": 1, "length": n}) + "\n" for n in LENGTHS),
    ".txt": "".join(f"{n}\n" for n in LENGTHS),
    ".parquet": LENGTHS,
}


@pytest.mark.parametrize("suffix", CONTENTS)
def test_every_format_gives_the_same_lengths_in_file_order(tmp_path, suffix):
    file = write(tmp_path / f"lengths{suffix}", CONTENTS[suffix])
    lengths = read_lengths(file)
    assert lengths.dtype == np.int64
    assert lengths.tolist() == LENGTHS
    assert read_lengths(str(file)).tolist() == LENGTHS


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("numbers.jsonl", "512\n\n7\n"),
        ("num_tokens.jsonl", '{"num_tokens": 512}\n{"num_tokens": 7.0}\n'),
        ("byte_order_mark.jsonl", "\ufeff512\n7\n"),
        ("upper.TXT", " 512 \n7"),
    ],
)
def test_accepted_spellings(tmp_path, name, text):
    assert read_lengths(write(tmp_path / name, text)).tolist() == [512, 7]


def test_key_chooses_column_and_field(tmp_path):
    assert read_lengths(write(tmp_path / "a.jsonl", '{"r": 3, "length": 1}\n'), key="r").tolist() == [3]
    parquet, table = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("pyarrow").table
    parquet.write_table(table({"prompt": [1, 2], "response": [3, 4]}), tmp_path / "a.parquet")
    assert read_lengths(tmp_path / "a.parquet", key="response").tolist() == [3, 4]
    with pytest.raises(BalanceError, match=r"but prompt, response; name the lengths with --key"):
        read_lengths(tmp_path / "a.parquet")
    with pytest.raises(BalanceError, match=r"has no 'length', but prompt, response"):
        read_lengths(tmp_path / "a.parquet", key="length")


def index_of(sequences, bounds, *, version=1):
    """As Megatron's IndexedDatasetBuilder writes it (test_compare.py reads one that it wrote)."""
    places = np.zeros(len(sequences), dtype="<i8")
    header = b"MMIDIDX\0\0" + struct.pack("<QBQQ", version, 4, len(sequences), len(bounds))
    return header + np.array(sequences, "<i4").tobytes() + places.tobytes() + np.array(bounds, "<i8").tobytes()


def test_sequences_of_an_index_are_the_documents_of_gptdataset(tmp_path):
    (tmp_path / "corpus.idx").write_bytes(index_of([3, 4, 0, 9], [0, 2, 3, 4, 4]))
    assert read_lengths(tmp_path / "corpus").tolist() == [3, 4, 0, 9]  # its prefix


def test_rows_lists_of_tokens_and_packed_files(tmp_path):
    rows = read_rows(write(tmp_path / "rows.jsonl", '[3, 4]\n{"length": [5]}\n{"input_ids": [7, 7, 7, 7, 7, 7]}\n8\n'))
    assert (rows.lengths.tolist(), rows.counts.tolist()) == ([3, 4, 5, 6, 8], [2, 1, 1, 1])
    counted = write(tmp_path / "a.jsonl", '{"tokens": [1, 2]}\n{"tokens": [3]}\n')
    assert read_lengths(counted, key="tokens").tolist() == [2, 1]
    for suffix in (".npy", ".jsonl", ".parquet"):
        file = write(tmp_path / f"lengths{suffix}", CONTENTS[suffix])
        assert read_lengths(file, limit=3).tolist() == LENGTHS[:3]
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(
        pytest.importorskip("pyarrow").table({"input_ids": [[1, 2], [], [3]]}), tmp_path / "ids.parquet"
    )
    assert read_lengths(tmp_path / "ids.parquet").tolist() == [2, 0, 1]


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.txt", "512\n-3\n", ["a.txt, row 2 is -3:", "from 0 to 2147483647", "leave the sample out"]),
        ("a.csv", "length\n1\n", ["unknown suffix '.csv'"]),
        ("a.txt", "7\nseven\n", ["row 2 is not JSON", "one value a line"]),
        ("a.txt", f"{MAX_LENGTH + 1}\n", ["is 2147483648:"]),
        ("a.txt", "\n \n", ["a.txt holds no lengths", "at least one sample"]),
        ("a.txt", b"caf\xe9\n", ["a.txt cannot be read: 'utf-8' codec"]),
        ("a.jsonl", "7\n{broken\n", ["row 2 is not JSON"]),
        ("a.jsonl", "7\n\ntrue\n", ["row 2 is True:"]),
        ("a.jsonl", "7\n[1, true]\n", ["row 2 is True:"]),
        ("a.jsonl", "[" * 100_000 + "\n", ["row 1 is not JSON"]),
        ("a.jsonl", "NaN\n", ["row 1 is nan:"]),
        ("a.jsonl", '{"tokens": 3}\n', ["row 1 has no 'length' or 'num_tokens' or", "but tokens;", "--key"]),
        ("a.dat", "1\n", ["unknown suffix '.dat'", ".npy", ".parquet"]),
        ("a.npy", "no array", ["a.npy cannot be read"]),
        ("a.npy", np.array([3, -1]), ["row 2 is -1:"]),
        ("a.npy", np.array([3.0, np.nan]), ["row 2 is nan:"]),
        ("a.npy", np.array([2.5]), ["row 1 is 2.5:"]),
        ("a.npy", np.array([2**63], dtype=np.uint64), ["is 9223372036854775808:"]),
        ("a.npy", np.array([], dtype=np.int64), ["holds no lengths"]),
        ("a.npy", np.ones((2, 3), dtype=np.int64), ["shape [2, 3]"]),
        ("a.npy", np.array(["3"]), ["lengths are integers"]),
        ("a.npz", "no archive", ["unknown suffix '.npz'"]),
        ("a.parquet", "no table", ["a.parquet cannot be read"]),
        ("a.parquet", [3, None], ["row 2 is nan:"]),
        ("a.idx", b"no index" * 9, ["does not begin with MMIDIDX"]),
        ("a.idx", index_of([3, 4], [0, 2])[:40], ["a.idx cannot be read: it is cut off"]),
        ("a.idx", index_of([3, 4], [0, 2], version=2), ["MMIDIDX, version 1"]),
        ("a.idx", index_of([3, -4], [0, 2]), ["row 2 is -4:"]),
        ("a.idx", index_of([], [0]), ["holds no lengths"]),
        ("a.idx", index_of([1], [0, 1])[:18] + struct.pack("<QQ", 2**62, 2**62), ["is cut off"]),
    ],
)
def test_a_wrong_file_is_named_with_place_value_and_remedy(tmp_path, name, content, said):
    if name.endswith(".parquet"):
        pytest.importorskip("pyarrow")
    with pytest.raises(BalanceError) as caught:
        read_lengths(write(tmp_path / name, content))
    for part in [name, *said]:
        assert part in str(caught.value)


@pytest.mark.parametrize("name", ["a.npy", "a.idx"])
def test_a_key_without_names_is_refused(tmp_path, name):
    with pytest.raises(BalanceError, match="leave out --key"):
        read_lengths(write(tmp_path / name, "1\n"), key="length")


def test_a_file_that_is_none_or_something_else(tmp_path):
    with pytest.raises(BalanceError, match=r"none\.npy cannot be read: No such file"):
        read_lengths(tmp_path / "none.npy")
    (tmp_path / "folder.txt").mkdir()
    with pytest.raises(BalanceError, match=r"folder\.txt cannot be read: Is a directory.*synthetic:NAME"):
        read_lengths(tmp_path / "folder.txt")


@pytest.mark.parametrize("name", SYNTHETIC_LENGTHS)
def test_synthetic_lengths_stay_inside_their_bounds_and_repeat(name):
    mixture = SYNTHETIC_LENGTHS[name]
    lengths = synthetic_lengths(name, num_samples=5000, seed=3)
    assert lengths.dtype == np.int64
    assert lengths.shape == (5000,)
    assert lengths.min() >= mixture["shortest"]
    assert lengths.max() <= mixture["longest"]
    assert np.array_equal(lengths[:100], synthetic_lengths(name, num_samples=100, seed=3))
    assert not np.array_equal(lengths, synthetic_lengths(name, num_samples=5000, seed=4))
    assert sum(weight for weight, _, _ in mixture["components"]) == pytest.approx(1.0, abs=1e-3)


def test_synthetic_lengths_have_the_published_mean():
    # Means of the real sets, tokens; the fit is within a few per cent, the draw within one.
    for name, mean in {"gsm8k_sft": 157.6, "alpaca_eval": 362.6, "servegen_mlarge": 1072.5}.items():
        assert synthetic_lengths(name, num_samples=50000).mean() == pytest.approx(mean, rel=0.04)


def test_a_seed_that_cannot_be_is_named():
    with pytest.raises(BalanceError, match="seed is -1"):
        synthetic_lengths("gsm8k_sft", num_samples=5, seed=-1)
