"""Cases to kill and resume: each policy, with and without overlap, on the same and on other numbers of ranks."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.equality.cases import GLOBAL_BATCH_SIZE, NUM_STEPS, SEQ_LENGTH

SAVE_INTERVAL = 3
"""Between checkpoints, so that most kills lose steps that were trained."""

FLAGS = (
    "--num-layers 1 --hidden-size 32 --num-attention-heads 4 --num-query-groups 2 --ffn-hidden-size 64 "
    f"--seq-length {SEQ_LENGTH} --max-position-embeddings {SEQ_LENGTH} --global-batch-size {GLOBAL_BATCH_SIZE} "
    f"--ckpt-format torch --use-dynamic-batch-size --max-tokens-per-gpu {2 * SEQ_LENGTH} --balance-data "
    "--balance-by-flops"
)
STEPS = f"--train-iters {NUM_STEPS}"

DYNAMIC = f"--balance-dynamic-cp --max-tokens-per-gpu {SEQ_LENGTH // 2}"
POLICIES = {"by FLOPs": "", "dynamic CP": DYNAMIC}
RANKS = ((2, 2), (2, 4), (4, 2), (2, 1))


@dataclass(frozen=True)
class Case:
    """A run that is killed, and one that goes on."""

    policy: str
    ranks: int
    ranks_after: int
    overlap: bool

    @property
    def name(self) -> str:
        overlap = "overlap" if self.overlap else "no overlap"
        return f"{self.policy}, DP{self.ranks}→DP{self.ranks_after}, {overlap}"

    @property
    def flags(self) -> str:
        return f"{FLAGS} {STEPS} {POLICIES[self.policy]} {'' if self.overlap else '--no-balance-overlap'}"


def cases() -> list[Case]:
    return [
        Case(policy, ranks=before, ranks_after=after, overlap=overlap)
        for overlap in (True, False)
        for before, after in RANKS
        for policy in POLICIES
    ]
