"""`--balance-verify`: a wrong first step ends every rank before the optimizer; a healthy run is left as it is."""

import json
from dataclasses import replace

import pytest
from table import BY_FLOPS, CAP, DYNAMIC_CP, ROWS, SHARDED, Row
from test_matrix import run_of

NUM_ERRORS = 10
"""All of tests/kit/wrong_steps.py: of packing, positions, masks and weights, to be found in fp32 and in bf16."""

VERIFIED = "--balance-verify"
MODEL = f"--position-embedding-type learned_absolute --max-position-embeddings {2 * CAP} --init-method-std 0.2"
"""Positions that count in a model whose attention is as uneven as that of a fresh one of hidden size 4096."""


def errors_in_turn(layout, balance, flags="", *, precision="fp32", slow=False):
    row = Row(precision, layout, balance, flags=f"{flags} {MODEL}", precision=precision)
    return pytest.param(row, id=f"{layout}-{precision}", marks=[pytest.mark.slow] if slow else [])


@pytest.mark.parametrize(
    "row",
    [
        errors_in_turn("DP2", BY_FLOPS),
        errors_in_turn("DP2", BY_FLOPS, SHARDED, precision="bf16"),
        errors_in_turn("CP2", DYNAMIC_CP, SHARDED, precision="bf16"),
        errors_in_turn("CP2", DYNAMIC_CP, slow=True),
        errors_in_turn("PP2", BY_FLOPS, slow=True),
        errors_in_turn("PP2", BY_FLOPS, "--bf16", precision="bf16", slow=True),
    ],
)
def test_every_error_is_found(train, row):
    turns = (("stand_ins:filler", {}), ("wrong_steps:in_turn", {}))
    steps = f"--train-iters {NUM_ERRORS + 2} --exit-interval 1"
    run = train(f"{row.stock} {row.balance} {VERIFIED} {steps}", num_ranks=row.num_ranks, stand_ins=turns)
    for rank in run.of_kind("verified"):
        assert [line["error"] for line in rank if "differs from stock" not in line["text"]] == []
        assert len({line["error"] for line in rank}) == len(rank) == NUM_ERRORS


HEALTHY = {
    ("DP2", "bf16-sharded-overlap"): False,
    ("TP2-SP", "by-flops"): False,
    ("PP2-VPP2", "by-flops"): False,
    ("CP2", "dynamic-cp"): False,
    ("EP2", "router-losses-filler"): False,
    ("DP2", "mtp"): False,
    ("DP2", "fp16"): True,
    ("DP2", "recomputed"): True,
    ("DP2", "over-long"): True,
    ("DP2", "windowed-cyclic-learned"): True,
    ("PP3", "padded-rows"): True,
    ("PP2-EP2", "by-flops"): True,
    ("DP2", "Qwen3.5-35B-A3B"): True,
    ("DP4", "Nemotron-3-Nano-dynamic-cp"): True,
    ("DP4", "gemma-3-12b-dynamic-cp"): True,
    ("CP2", "GLM-4.5-mtp-dynamic-cp"): True,
}
"""Rows of the table, and whether each is left to `make test-all`."""


@pytest.mark.parametrize(
    "row",
    [
        pytest.param(row, id=f"{row.layout}-{row.name}", marks=[pytest.mark.slow] if HEALTHY[key] else [])
        for row in ROWS
        if (key := (row.layout, row.name)) in HEALTHY
    ],
)
def test_a_healthy_run_is_left_as_it_is(train, row):
    """To the bit: losses, gradient norms and what is logged, of router losses and multi-token prediction too."""
    without = run_of(train, row)
    verified = run_of(train, replace(row, balance=f"{row.balance} {VERIFIED}"))
    assert verified.log(0).count("the first step equals stock: learned tokens") == 1
    for kind in ("step", "evaluation", "logged"):
        for ours, theirs in zip(verified.of_kind(kind), without.of_kind(kind), strict=True):
            assert [figures(line) for line in ours] == [figures(line) for line in theirs]


def figures(line):
    """The numbers of a line, without those of the micro-batches that ran and of the machine."""
    numbers = {name: number for name, number in line.get("numbers", {}).items() if not name.startswith("balance/")}
    return {name: line.get(name) for name in ("lm_loss", "grad_norm", "losses")} | numbers


@pytest.mark.parametrize("pp_size", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_hand_written_loop(train, pp_size):
    """Its rows hold one or two sequences, of any lengths."""
    without, verified = (
        train("", num_ranks=2 * pp_size, module="train_core_loop", environment={"LOOP": json.dumps(settings)})
        for settings in ({"pp_size": pp_size}, {"pp_size": pp_size, "flags": [VERIFIED]})
    )
    assert verified.log(0).count("the first step equals stock") == 1
    assert [figures(line) for line in verified.steps] == [figures(line) for line in without.steps]
