"""Runs that are killed and go on; ranks that fail: every rank ends by itself and says why."""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass

import pytest
from table import BY_FLOPS, DYNAMIC_CP, FAMILY_ROWS, NUM_STEPS, RECORDED, ROWS, Row, StandIns
from test_matrix import run_of, samples

from megatron_balance.record import read_record

FAMILIES = {row.model: row for row in reversed(FAMILY_ROWS)}
SAVED_AT = 2
DEATH = "--distributed-timeout-minutes 5 --distributed-timeout-seconds-after-init 40"
"""Ranks that do not talk to a dead one themselves wait so long."""


def struck(*ranks, number=signal.SIGKILL, step=2):
    """These ranks get a signal as a step begins."""
    return (("stand_ins:struck", {"step": step, "ranks": list(ranks), "number": number}),)


def killed_run(train, balance, *, num_ranks=2):
    """A run that is killed in the step after its checkpoint."""
    flags = f"{ROWS[0].stock} {balance} --save {{run}}/checkpoints --save-interval {SAVED_AT} --ckpt-format torch"
    killed = train(flags, num_ranks=num_ranks, stand_ins=struck(*range(num_ranks), step=SAVED_AT + 1), fails=True)
    assert all(len(steps) == SAVED_AT for steps in killed.of_kind("step"))
    return killed


@pytest.mark.parametrize("row", [pytest.param(ROWS[0], id="DP2")])
def test_a_killed_run_goes_on_to_the_bit(train, row):
    """Model, data, evaluation and record are those of a run that was not interrupted."""
    whole = run_of(train, row)
    killed = killed_run(train, f"{BY_FLOPS} {RECORDED}")
    flags = f"{row.stock} {BY_FLOPS} --balance-record {killed.folder}/record --ckpt-format torch"
    resumed = train(f"{flags} --load {killed.folder}/checkpoints")
    for key in ("lm_loss", "grad_norm"):
        assert [step[key] for step in resumed.steps] == [step[key] for step in whole.steps[SAVED_AT:]]
    assert samples(resumed, "step") == samples(whole, "step")[SAVED_AT:]
    assert resumed.losses() == whole.losses()[1:]
    ours, theirs = (read_record(run.folder / "record").steps for run in (killed, whole))
    assert [step.iteration for step in ours] == [step.iteration for step in theirs]
    for mine, expected in zip(ours, theirs, strict=True):
        assert mine.lengths.tolist() == expected.lengths.tolist()


@pytest.mark.slow
def test_a_killed_run_goes_on_with_more_ranks(train):
    whole, killed = run_of(train, ROWS[0]), killed_run(train, BY_FLOPS)
    load = f"--load {killed.folder}/checkpoints --ckpt-format torch"
    resumed = train(f"{ROWS[0].stock} {BY_FLOPS} {load}", num_ranks=4)
    assert samples(resumed, "step") == samples(whole, "step")[SAVED_AT:]
    assert [step["lm_loss"] for step in resumed.steps] == pytest.approx([s["lm_loss"] for s in whole.steps[SAVED_AT:]])


@pytest.mark.parametrize("row", [pytest.param(ROWS[0], id="DP2")])
def test_helpers_that_fail_end_no_run(train, row):
    """Every rank loses its planning process and the record: it says so once, and trains on the same samples.

    The disk of one rank is full, that of the other hangs.
    """
    whole = run_of(train, row)
    struck = train(f"{row.stock} {row.balance}", stand_ins=(("stand_ins:helpers_fail", {"step": 2}),))
    for key in ("lm_loss", "grad_norm"):
        assert [step[key] for step in struck.steps] == [step[key] for step in whole.steps]
    assert [microbatches["microbatches"] for microbatches in struck.steps] == [
        microbatches["microbatches"] for microbatches in whole.steps
    ]
    lost = ("Training continues without the record", " 3 lines of the record were not written")
    for rank, said in enumerate(lost):
        assert struck.log(rank).count("has ended with exit code -9") == 1
        assert struck.log(rank).count(said) == 1


@dataclass(frozen=True)
class Fault:
    """What goes wrong on some ranks: every one that is not `dead` says `says`, a regular expression.

    Where `others` is given, the first rank alone says so, and the others that.
    """

    stand_ins: StandIns
    says: str
    layout: str = ""
    num_ranks: int = 2
    balance: str = BY_FLOPS
    dead: tuple[int, ...] = ()
    slow: bool = True
    row: Row = ROWS[0]
    others: str = ""


def data(how, *, rank=1, index=21):
    """The data set of a rank goes wrong at a row, by default in the second step."""
    return (("stand_ins:bad_data", {"ranks": [rank], "how": how, "index": index}),)


def flags(*ranks, flags="", instead_of=""):
    """Other flags on these ranks."""
    return (("stand_ins:flags_there", {"ranks": list(ranks), "flags": flags, "instead_of": instead_of}),)


PP2, TP2 = "--pipeline-model-parallel-size 2", "--tensor-model-parallel-size 2"
LOST = r"not all answered|Megatron waited for other ranks"
OTHER_COSTS = "--window-size 64,0"
"""A flag of the model that changes what samples cost, and no flag of balancing."""

FAULTS = {
    "a-rank-is-killed": Fault(struck(1), LOST, num_ranks=4, dead=(1,), slow=False),
    "a-stage-is-killed": Fault(struck(2), LOST, layout=PP2, num_ranks=4, dead=(2,)),
    "the-loader-raises": Fault(data("raises"), r"rank 1 failed: .*OSError: \[Errno 5\] the disk is gone", slow=False),
    "a-wrong-token": Fault(data("negative"), r"rank 1 failed: item \d of this step: Row 0: tokens holds -7"),
    "a-rank-has-no-flags": Fault(
        flags(1, instead_of=BY_FLOPS), r"balancing is on on rank 0 and off \(no balance flag\) on rank 1", slow=False
    ),
    "a-rank-has-other-costs": Fault(
        flags(1, flags=OTHER_COSTS), "Ranks were started differently: cost model is", slow=False
    ),
    "a-stage-plans-otherwise": Fault(
        # The second pair of ranks meets after the first has ended, and with it the store.
        (("stand_ins:other_ties", {"ranks": [2, 3]}), ("stand_ins:slow_packs", {"ranks": [1, 3]})),
        "the data of this step differs within a model replica",
        layout=PP2,
        num_ranks=4,
        balance=DYNAMIC_CP,
        slow=False,
    ),
    "mamba-is-not-told-sequences-apart": Fault(
        (("families:sequences_not_told_apart", {}),),
        "PackedSeqParams.seq_idx is none",
        slow=False,
        row=FAMILIES["Nemotron-3-Nano"],
    ),
    "positions-are-split-by-the-script": Fault(
        (("families:positions_of_own_tokens", {}),),
        r"position_ids has \d+ positions for a micro-batch of \d+ tokens",
        balance=DYNAMIC_CP,
        num_ranks=4,
        row=FAMILIES["Qwen3-VL"],
    ),
    "interrupted": Fault(struck(0, 1, number=signal.SIGINT), "KeyboardInterrupt"),
    "a-rank-hangs": Fault(struck(1, number=signal.SIGSTOP), LOST, num_ranks=4, dead=(1,)),
    "the-loader-raises-beside-a-rank-that-reads-nothing": Fault(
        data("raises", rank=2), r"rank 2 failed: .*the disk is gone", layout=TP2, num_ranks=4
    ),
    "a-rank-has-another-version": Fault(
        (("stand_ins:other_version", {"ranks": [1]}),),
        r"version of megatron_balance is (\S+)\+\w+ on rank 0 and \1\+0{10} on",
    ),
    "a-rank-lacks-the-seconds": Fault(
        flags(1, flags="--balance-cost nowhere.json"), "rank 1 failed: .* cannot be read"
    ),
    "a-rank-trains-without-the-package": Fault(
        (("stand_ins:without_the_package", {"ranks": [1], "flags": BY_FLOPS}),),
        r"rank 1 of 2 did not join the .*trains without megatron_balance",
        balance=f"{BY_FLOPS} --distributed-timeout-minutes 1",
        dead=(1,),
    ),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if fault.slow else []) for name, fault in FAULTS.items()]
)
def test_every_rank_ends_and_says_why(train, name):
    fault = FAULTS[name]
    run = train(
        f"{fault.row.stock} {fault.layout} {DEATH if fault.dead else ''} {fault.balance}",
        num_ranks=fault.num_ranks,
        stand_ins=(*fault.row.stand_ins, *fault.stand_ins),
        leave_out=fault.row.without,
        fails=True,
        dead=fault.dead,
    )
    for rank, errors in enumerate(run.of_kind("error")):
        if rank not in fault.dead:
            said = " ".join([*(error["text"] for error in errors), run.log(rank)])
            assert errors, f"rank {rank} did not end by itself: {said[-1500:]}"
            says = (rank and fault.others) or fault.says
            assert re.search(says, said), f"rank {rank} says {said[-1500:]}"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "stand_ins"), [("--exit-interval 2", ()), ("--exit-signal-handler", struck(1, number=signal.SIGTERM))]
)
def test_ends_that_megatron_knows_are_no_fault(train, flags, stand_ins):
    ended = train(f"{ROWS[0].stock} {BY_FLOPS} {flags}", stand_ins=stand_ins)
    assert [len(steps) for steps in ended.of_kind("step")] == [2, 2]
    assert "exiting program" in ended.log(0)


def test_mamba_layers_without_balancing_are_left_as_they_are(train):
    row, leak = FAMILIES["Nemotron-3-Nano"], ("families:sequences_not_told_apart", {})
    assert len(train(row.stock, stand_ins=(*row.stand_ins, leak), leave_out=row.without).steps) == NUM_STEPS
