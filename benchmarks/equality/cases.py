"""Cases of the equality matrix: layouts of ranks × precisions × optimizers × ways to train.

Every cell (layout, precision, optimizer) has a stock run, which the others of that cell are compared with. Three more
stock runs show how far rounding goes without this package: one that shuffles the rows within each global batch, so that
sums are added in another order, and two with several rows in a micro-batch, so that matrices have other shapes. These
tell little in fp32 and much in bf16, where a matrix product is rounded before it is added to the others.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

NUM_STEPS = 8
GLOBAL_BATCH_SIZE = 16
SEQ_LENGTH = 512
SEED = 1234

COMMON = (
    "--hidden-size 32 --num-attention-heads 4 --num-query-groups 2 --ffn-hidden-size 64 "
    f"--seq-length {SEQ_LENGTH} --max-position-embeddings {SEQ_LENGTH} --global-batch-size {GLOBAL_BATCH_SIZE} "
    f"--train-iters {NUM_STEPS} --seed {SEED}"
)


@dataclass(frozen=True)
class Layout:
    flags: str
    num_ranks: int


_MOE = (
    "--num-layers 2 --expert-model-parallel-size 2 --num-experts 4 --moe-router-topk 2 "
    "--moe-token-dispatcher-type alltoall"
)
_INTERLEAVED = "--num-layers 4 --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1"

LAYOUTS = {
    "DP2": Layout("--num-layers 2", 2),
    "DP4": Layout("--num-layers 2", 4),
    "DP2 PP2": Layout("--num-layers 2 --pipeline-model-parallel-size 2", 4),
    "DP2 TP2": Layout("--num-layers 2 --tensor-model-parallel-size 2", 4),
    "DP2 TP2 SP": Layout("--num-layers 2 --tensor-model-parallel-size 2 --sequence-parallel", 4),
    "DP2 CP2": Layout("--num-layers 2 --context-parallel-size 2", 4),
    "DP2 PP2 VPP2": Layout(_INTERLEAVED, 4),
    "DP2 EP2": Layout(f"{_MOE} --moe-router-load-balancing-type none", 2),
    "DP2 TP2 PP2 VPP2": Layout(f"{_INTERLEAVED} --tensor-model-parallel-size 2", 8),
}

AUX_LOSSES = ("aux_loss", "seq_aux_loss", "global_aux_loss")
AUX_LAYOUTS = {
    name: Layout(f"{_MOE} --moe-router-load-balancing-type {name} --moe-aux-loss-coeff 1e-2", 2) for name in AUX_LOSSES
}

PRECISIONS = {"fp32": "", "bf16": "--bf16"}

OPTIMIZERS = {
    "plain": "",
    "distributed": "--use-distributed-optimizer",
    "overlap": "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather",
}

_PACKED = f"--use-dynamic-batch-size --max-tokens-per-gpu {SEQ_LENGTH}"
_BY_FLOPS = f"{_PACKED} --balance-data --balance-by-flops"

POLICIES = {
    "by FLOPs": _BY_FLOPS,
    "by tokens": f"{_PACKED} --balance-data",
    "moved, one a micro-batch": "--balance-data",
    "packed in place": _PACKED,
    "by FLOPs in place": f"{_PACKED} --balance-by-flops",
    "Karmarkar-Karp": f"{_BY_FLOPS} --balance-algorithm karmarkar_karp",
}

TORCHRUN = "by FLOPs, started by torchrun"
STOCK = "stock"
SHUFFLED = "stock, shuffled"
TWO_A_MICROBATCH = "stock, 2 a micro-batch"
FOUR_A_MICROBATCH = "stock, 4 a micro-batch"
_OTHER_WAYS = {
    TORCHRUN: _BY_FLOPS,
    STOCK: "",
    SHUFFLED: "",
    TWO_A_MICROBATCH: "--micro-batch-size 2",
    FOUR_A_MICROBATCH: "--micro-batch-size 4",
}

_FIRST = (("fp32", "plain"), ("bf16", "overlap"))
YARDSTICKS = (SHUFFLED, TWO_A_MICROBATCH, FOUR_A_MICROBATCH)
_EVERYWHERE = ("by FLOPs", "by tokens", "moved, one a micro-batch")
_LAYOUTS_OF_EVERY_POLICY = ("DP2", "DP2 PP2", "DP2 EP2")
_AUX_WAYS = (STOCK, SHUFFLED, TWO_A_MICROBATCH, FOUR_A_MICROBATCH, "moved, one a micro-batch", "packed in place")


@dataclass(frozen=True)
class Case:
    layout: str
    precision: str
    optimizer: str
    way: str

    @property
    def cell(self) -> tuple[str, str, str]:
        """Layout, precision and optimizer, which it shares with its reference."""
        return self.layout, self.precision, self.optimizer

    @property
    def name(self) -> str:
        return " / ".join((*self.cell, self.way))

    @property
    def is_balanced(self) -> bool:
        return self.way in POLICIES or self.way == TORCHRUN

    @property
    def num_ranks(self) -> int:
        return (LAYOUTS | AUX_LAYOUTS)[self.layout].num_ranks

    @property
    def flags(self) -> str:
        """Megatron's flags of the model and of this case."""
        parts = (COMMON, (LAYOUTS | AUX_LAYOUTS)[self.layout].flags, PRECISIONS[self.precision])
        return " ".join((*parts, OPTIMIZERS[self.optimizer], (POLICIES | _OTHER_WAYS)[self.way])).strip()

    @property
    def reference(self) -> Case:
        """The run that this one is compared with: a stock run; a started one with the forked one."""
        return self.beside("by FLOPs" if self.way == TORCHRUN else STOCK)

    def beside(self, way: str) -> Case:
        return Case(*self.cell, way)


def cases(*, whole: bool) -> list[Case]:
    """All runs, the more telling ones first; a run that another needs comes before it."""
    return list(dict.fromkeys(_in_turn(whole=whole)))


def _in_turn(*, whole: bool) -> Iterator[Case]:
    kinds = [(precision, optimizer) for optimizer in OPTIMIZERS for precision in PRECISIONS]
    yield from _kind_cases(_FIRST, whole=whole)
    for layout in AUX_LAYOUTS:
        yield from (Case(layout, "fp32", "plain", way) for way in (*_AUX_WAYS, *_EVERYWHERE))
    yield from _kind_cases(kinds, whole=whole)
    yield from (Case("DP2", *kind, TORCHRUN) for kind in _FIRST)


def _kind_cases(kinds: Sequence[tuple[str, str]], *, whole: bool) -> Iterator[Case]:
    cells = [(layout, *kind) for kind in kinds for layout in LAYOUTS]
    for cell in cells:
        yield from (Case(*cell, way) for way in (STOCK, *_yardsticks_of(cell[0]), *_EVERYWHERE))
    for cell in cells:
        for policy in POLICIES if whole or cell[0] in _LAYOUTS_OF_EVERY_POLICY else ():
            yield Case(*cell, policy)


def _yardsticks_of(layout: str) -> Sequence[str]:
    # Stock stages of a pipeline expect activations of one row a micro-batch where rows are packed.
    return YARDSTICKS if "PP" not in layout else (SHUFFLED,)
