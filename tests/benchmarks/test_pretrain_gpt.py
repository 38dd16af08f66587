"""Megatron's pretrain_gpt.py, unedited: the verdicts, the data, and a few layouts on a checkout.

The wheel lacks the script, and so does the source distribution; on a checkout:

    MEGATRON_CHECKOUT=DIR python -m pytest -m checkout tests/benchmarks/test_pretrain_gpt.py
"""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from training_run import ROOT, Recorded

from benchmarks.pretrain_gpt.cases import DATA, DYNAMIC, LAYOUTS, NUM_STEPS, Case, cases
from benchmarks.pretrain_gpt.data import CONVERSATIONS_IN_A_ROW, NUM_SAMPLES, write_data
from benchmarks.pretrain_gpt.outcomes import Outcome, judge, judge_refusal, last_error

CASE = Case("DP2 CP2", DATA[1], balanced=True)
LEAN = ("DP2 CP2", "DP2 PP2 VPP2 / --data", "PP4 / --data", "DP2 EP2 allgather / --sft")
"""Cases that this package's own training script does not show: rows split as a whole, chunks and stages of a pipeline
that get no data in stock runs, the default dispatcher.
"""


def outcome(*, off: float = 0.0, num_steps: int = NUM_STEPS, balanced: bool = True) -> Outcome:
    """A run whose last loss is off by this much, relatively."""
    steps = [{"lm_loss": 5.0, "grad_norm": 1.0, "cpu_seconds": 1.0} for _ in range(num_steps)]
    steps[-1]["lm_loss"] *= 1 + off
    return Outcome(Recorded([[step | ({"ranks": []} if balanced else {}) for step in steps]], output=""))


STOCK = outcome(balanced=False)
FAILED = Outcome(error="RuntimeError: sizes differ")


@pytest.mark.parametrize(
    ("ours", "stock", "one_rank", "good", "says"),
    [
        pytest.param(outcome(), STOCK, None, True, "equal", id="as-stock"),
        pytest.param(outcome(off=1e-5), STOCK, None, False, "differs", id="off-by-1e-5"),
        pytest.param(outcome(balanced=False), STOCK, None, False, "0 of 4 steps were balanced", id="not-balanced"),
        pytest.param(outcome(num_steps=3), STOCK, None, False, "3 of 4 steps were balanced", id="too-few-steps"),
        pytest.param(FAILED, STOCK, None, False, "fails: RuntimeError: sizes differ", id="fails"),
        pytest.param(outcome(), FAILED, STOCK, True, "equal", id="as-one-rank"),
        pytest.param(outcome(off=1e-5), FAILED, STOCK, False, "differs", id="not-as-one-rank"),
        pytest.param(outcome(), FAILED, FAILED, False, "there is no reference", id="no-reference"),
    ],
)
def test_verdicts(ours: Outcome, stock: Outcome, one_rank: Outcome | None, good: bool, says: str) -> None:
    verdict = judge(CASE, ours=ours, stock=stock, one_rank=one_rank)
    assert (verdict.good, verdict.says) == (good, says)
    assert ("stock fails: RuntimeError" in verdict.reference) == (stock is FAILED and ours.recorded is not None)


@pytest.mark.parametrize(
    ("ours", "good"),
    [
        (Outcome(error="x.BalanceError: --moe-token-dispatcher-type is allgather: set alltoall"), True),
        (Outcome(error="RuntimeError: gloo, --moe-token-dispatcher-type"), False),
        (Outcome(error="x.BalanceError: --num-experts is 4"), False),
        (outcome(), False),
    ],
)
def test_a_refusal_names_its_flag(ours: Outcome, good: bool) -> None:
    assert judge_refusal(Case("DP2 EP2 allgather", DATA[0], balanced=True, model="experts"), ours=ours).good is good


def test_the_last_error_of_an_output_is_its_own_line() -> None:
    output = "ValueError: first\n  raise x\n[rank0]: pkg.errors.BalanceError: --flag is 1: set 2\nWARNING: bye\n"
    assert last_error(output) == "pkg.errors.BalanceError: --flag is 1: set 2"
    assert last_error("it hung\nno end after 900 s\n") == "no end after 900 s"


def test_every_layout_runs_on_both_kinds_of_data() -> None:
    every = list(cases())
    assert {(case.layout, case.data) for case in every} == {(name, data) for name in LAYOUTS for data in DATA}
    assert {case.layout for case in every if case.dynamic} == {*DYNAMIC}
    name = "DP2 TP2 SP / --sft / balanced"
    assert [case.name for case in cases(["TP2 SP / --sft"])] == [name, f"{name} / dynamic sizes"]


@pytest.mark.parametrize("size", [1, 2])
def test_with_dynamic_sizes_some_micro_batch_is_shared(size: int) -> None:
    ours = outcome()
    for step in ours.recorded.steps if ours.recorded else ():
        step["cp_sizes"] = [1, size]
    verdict = judge(replace(CASE, dynamic=True), ours=ours, stock=STOCK, one_rank=None)
    assert verdict.says == ("equal" if size > 1 else "no micro-batch was shared")


def test_the_data(tmp_path: Path) -> None:
    from megatron.core.datasets.indexed_dataset import IndexedDataset
    from transformers import AutoTokenizer

    data = write_data(tmp_path)
    rows = [json.loads(line)["messages"] for line in data.conversations.read_text("utf-8").splitlines()]
    counts = [sum(message["role"] == "system" for message in row) for row in rows]
    assert tuple(counts[:3]) == CONVERSATIONS_IN_A_ROW
    assert sum(counts) == NUM_SAMPLES
    tokenizer = AutoTokenizer.from_pretrained(data.tokenizer)
    tokens = tokenizer.apply_chat_template(rows[0], tokenize=True)["input_ids"]
    assert tokens.count(tokenizer.eos_token_id) == len(rows[0])  # one ends each message
    assert max(tokens) < len(tokenizer) == 258
    documents = IndexedDataset(str(data.documents))
    lengths = np.asarray(documents.sequence_lengths)
    assert len(documents) == NUM_SAMPLES
    assert len(set(lengths.tolist())) > 100
    assert np.any(lengths % 4)  # context parallelism must pad


@pytest.mark.checkout
@pytest.mark.slow
def test_the_script_of_a_checkout_trains_as_stock_does() -> None:
    command = [str(ROOT / "scripts" / "check_upstream.sh"), os.environ["MEGATRON_CHECKOUT"], "--only", *LEAN]
    done = subprocess.run(command, text=True, capture_output=True, timeout=3600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "7 of 7 as they must be" in done.stdout
