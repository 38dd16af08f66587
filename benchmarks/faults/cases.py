"""Cases of faults, and the error that every surviving rank must end with."""

from __future__ import annotations

from dataclasses import dataclass

GLOBAL_BATCH_SIZE = 8
STEP = 3
"""The step at which a fault strikes."""

NUM_STEPS = 5
TIMEOUT_SECONDS = 20
"""Of process groups after the first step."""

START_MINUTES = 5
"""Of process groups until then: several runs may share the machine."""

BALANCE = "--use-dynamic-batch-size --max-tokens-per-gpu 512 --balance-data --balance-by-flops"
PP2 = "--pipeline-model-parallel-size 2"
TP2 = "--tensor-model-parallel-size 2"
CP2 = "--context-parallel-size 2"


@dataclass(frozen=True)
class Fault:
    """One run.

    Attributes:
        happens: for people.
        says: must be in what every rank that is left prints; a regular expression.
        strike: name in `STRIKES`, or `none`.
        ranks: on which it strikes, the only ones to get `flags_there`.
        num_ranks: of the run.
        flags: of all ranks, beside the balance flags.
        balance: the balance flags of the ranks where nothing strikes.
        flags_there: of the ranks where it strikes: their balance flags in place of the others'; None for the same.
        hooked: whether the ranks where it strikes have the package's hooks.
        dies: whether these ranks are killed or stopped, and so say nothing.
        goes_on: the run must end well, on every rank.
    """

    happens: str
    says: str
    strike: str = "none"
    ranks: tuple[int, ...] = (1,)
    num_ranks: int = 2
    flags: str = ""
    balance: str = BALANCE
    flags_there: str | None = None
    hooked: bool = True
    dies: bool = False
    goes_on: bool = False

    @property
    def layout(self) -> str:
        """For people."""
        for name, flag in (("TP2", TP2), ("PP2", PP2), ("CP2", CP2)):
            if flag in self.flags:
                return f"{name}×DP{self.num_ranks // 2}"
        return f"DP{self.num_ranks}"


_SAMPLE = rf"rank 1: item 3 of this step \(in the data set: sample {STEP * GLOBAL_BATCH_SIZE - 1}\): "
_NOT_PACKED = "the data has no cu_seqlens: .* drop --use-dynamic-batch-size and --balance-data"
_LOADER = r"fetching item 3 of this step: OSError: \[Errno 5\] the disk is gone"
_PLANNER = r"rank 1: the planning process \(\d+\) has ended with signal 9 \(Killed\)"
_DISAGREE = rf"Ranks make different steps .*: {STEP} on rank \d; {STEP - 1} on rank \d.*--no-balance-overlap"
_LOST = rf"iteration {STEP}: .*waited for {{what}} .*among .*, and not all answered"
_LOST_AHEAD = rf"iteration {STEP + 1}: .*waited for .* among .*, and not all answered"
_MEGATRON = rf"iteration ({STEP - 1}|{STEP}): Megatron waited for other ranks in a collective of its own"
_GATHER = _LOST.format(what="the lengths of all ranks' samples")
_EXCHANGE = _LOST.format(what="samples from the ranks that loaded them")

DATA = {
    "ends-early": Fault(
        "one rank's data ends early", r"rank 1: its data ended after 3 of 4 items of this step", "ends-early"
    ),
    "other-dtype": Fault(
        "one rank yields another dtype", r"on rank 1 'loss_mask' is float64 \[original_seq_len\]", "other-dtype"
    ),
    "no-cu-seqlens": Fault(
        "one rank's rows have no cu_seqlens", r"Rows of rank 1 have no cu_seqlens, and those of rank 0", "no-cu-seqlens"
    ),
    "ends-early-tp2": Fault(
        "the same, with a rank that reads no data",
        r"rank 2: its data ended after 3 of 4 items of this step",
        "ends-early",
        ranks=(2, 3),
        num_ranks=4,
        flags=TP2,
    ),
    "no-cu-seqlens-anywhere": Fault(
        "no rank's rows have cu_seqlens", _NOT_PACKED, "no-cu-seqlens", ranks=(0, 1), flags=TP2
    ),
    "falling-cu-seqlens": Fault(
        "a sample's cu_seqlens fall", _SAMPLE + "Row 0: cu_seqlens falls", "falling-cu-seqlens"
    ),
    "short-labels": Fault(
        "a sample's labels are too few", _SAMPLE + "labels has shape .* must be of one length", "short-labels"
    ),
    "nan-mask": Fault("a sample's loss_mask is NaN", _SAMPLE + "Row 0: loss_mask holds NaN", "nan-mask"),
    "negative-token": Fault("a sample has a token below 0", _SAMPLE + "Row 0: tokens holds -7", "negative-token"),
    "other-data-pp2": Fault(
        "one pipeline stage reads another data set",
        r"in the data-parallel group of rank [23] other samples were read than in that of rank [01]",
        "other-data",
        ranks=(2, 3),
        num_ranks=4,
        flags=PP2,
    ),
    "other-data-cp2": Fault(
        "a context-parallel rank reads another data set",
        r"in the data-parallel group of rank [13] other samples were read than in that of rank [02]",
        "other-data",
        ranks=(3,),
        num_ranks=4,
        flags=CP2,
    ),
}

FLAGS = {
    "other-cap": Fault(
        "one rank has another cap",
        r"max_tokens_per_gpu is 512 on ranks 0, 2, 3 and 1024 on rank 1",
        num_ranks=4,
        flags_there=BALANCE.replace("512", "1024"),
    ),
    "no-flags": Fault(
        "one rank has no balance flag",
        r"balancing is on on rank 0 and off \(no balance flag\) on rank 1",
        flags_there="",
    ),
    "other-version": Fault(
        "one rank has another version of the package",
        r"version of megatron_balance is \S+ on rank 0 and 0\.0\.1 on rank 1",
        "other-version",
    ),
    "no-file": Fault(
        "one rank lacks the calibration file",
        r"rank 1: the calibration .* cannot be read",
        flags_there=f"{BALANCE} --balance-cost nowhere.json",
    ),
    "no-hooks": Fault(
        "one rank trains without the package",
        r"rank 1 of 2 did not come to agree on .*trains without megatron_balance",
        flags="--distributed-timeout-minutes 1",
        flags_there="",
        hooked=False,
        dies=True,
    ),
}

DEATHS = {
    f"{how}-{when}": Fault(f"a rank {what} {place}", says, f"{how}-{when}", num_ranks=4, dies=True)
    for how, what in (("killed", "is killed"), ("stopped", "hangs"))
    for when, place, says in (
        ("before-exchange", "before the exchange", _GATHER),
        ("during-exchange", "during the exchange", rf"{_EXCHANGE}|{_LOST_AHEAD}|{_MEGATRON}"),
        ("after-exchange", "after the exchange", rf"{_LOST_AHEAD}|{_MEGATRON}"),
        ("computing", "while it computes", rf"{_LOST_AHEAD}|{_MEGATRON}"),
    )
} | {
    "killed-before-exchange-tp2": Fault(
        "the same, with ranks that read no data",
        rf"{_GATHER}|waited for the plans? .*of this model replica|{_MEGATRON}",
        "killed-before-exchange",
        ranks=(2,),
        num_ranks=4,
        flags=TP2,
        dies=True,
    ),
}

ENDS = {
    "interrupted": Fault("Ctrl-C, heard by every rank", "KeyboardInterrupt", "interrupted", ranks=(0, 1)),
    "terminated": Fault("SIGTERM to one rank", rf"{_LOST_AHEAD}|{_MEGATRON}", "terminated", dies=True),
    "exit-signal": Fault(
        "SIGTERM under --exit-signal-handler",
        "exiting program after receiving SIGTERM",
        "terminated",
        flags="--exit-signal-handler",
        goes_on=True,
    ),
    "exit-interval": Fault(
        "--exit-interval ends the run",
        f"exiting program at iteration {STEP}",
        flags=f"--exit-interval {STEP}",
        goes_on=True,
    ),
}

ERRORS = {
    "loader-raises": Fault("one rank's loader raises, in the thread", f"rank 1: {_LOADER}", "loader-raises"),
    "loader-raises-pp2": Fault(
        "the same in a pipeline stage, in the thread",
        f"rank 3: {_LOADER}",
        "loader-raises",
        ranks=(3,),
        num_ranks=4,
        flags=PP2,
    ),
    "loader-raises-tp2": Fault(
        "the same, with a rank that reads no data",
        f"rank 2: {_LOADER}",
        "loader-raises",
        ranks=(2,),
        num_ranks=4,
        flags=TP2,
    ),
    "bug-in-splitting": Fault(
        "an unforeseen error while samples are split, in the thread",
        r"rank 1: item 0 of this step .*RuntimeError: a bug in split_packed",
        "bug-in-splitting",
    ),
    "bug-in-packing": Fault(
        "the same while they are packed",
        "rank 1: packing this step's samples: RuntimeError: a bug in pack_microbatch",
        "bug-in-packing",
    ),
    "planner-killed": Fault("one rank's planning process is killed", _PLANNER, "planner-killed", goes_on=True),
    "other-iterator": Fault("one rank's loop comes with another iterator", _DISAGREE, "other-iterator"),
}

KINDS = {
    "data that is wrong": DATA,
    "errors in the loader, the planner or this package": ERRORS,
    "ranks started differently": FLAGS,
    "ranks that die or hang": DEATHS,
    "ends that are no fault": ENDS,
}
FAULTS = {**DATA, **ERRORS, **FLAGS, **DEATHS, **ENDS}
"""By the name that chooses one."""
