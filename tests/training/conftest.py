"""The runs and the data that all tests of this folder share."""

import pytest
from kept_runs import KeptRuns, write_rollouts, write_rows
from table import SEQ_LENGTH

TRAINED = range(1, 65)
VALIDATION_SETS = {"valid": range(100, 124), "odd": range(130, 141)}
"""First tokens of the samples, by which tests know them."""


@pytest.fixture(scope="session")
def train(tmp_path_factory):
    """Makes a run, or finds it made; workers of pytest-xdist share the folder above their own."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if base.name.startswith("popen-") else base) / "kept-runs"
    data = base / "data"
    data.mkdir()
    write_rows(data / "train.jsonl", TRAINED, longest=SEQ_LENGTH, seed=1)
    write_rows(data / "two-lengths.jsonl", TRAINED, longest=96, seed=1, few=2)
    write_rows(data / "one-length.jsonl", TRAINED, longest=SEQ_LENGTH, seed=1, few=1)
    for seed, name in enumerate(("rollouts", "rollouts-valid")):
        write_rollouts(data / f"{name}.jsonl", seed=seed, longest=SEQ_LENGTH)
    for seed, (name, firsts) in enumerate(VALIDATION_SETS.items()):
        write_rows(data / f"{name}.jsonl", firsts, longest=SEQ_LENGTH, seed=seed + 2)
    return KeptRuns(folder, data=data)
