"""Runs of pretrain_gpt.py: layouts of ranks × kinds of data, stock and balanced.

Every run starts from the same weights, a checkpoint that one rank wrote, so that a run on one rank is a reference for
every layout of the same model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from benchmarks.sft.data import PADDING, PretrainData

NUM_STEPS = 4
SEQ_LENGTH = 512
MAX_TOKENS = 768
"""Above the row length: a balanced micro-batch then differs from a row even where rows hold no padding."""
MAX_TOKENS_DYNAMIC = 192
"""Below the row length: the longest samples need several ranks."""

COMMON = (
    "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --num-query-groups 2 --ffn-hidden-size 64 "
    f"--seq-length {SEQ_LENGTH} --max-position-embeddings {SEQ_LENGTH} --global-batch-size 8 --split 100,0,0 "
    # As many as the tokenizer of conversations has, and the same on one rank and on two that share them.
    "--vocab-size 258"
)
MOVED = "--balance-data"
BALANCED = f"--use-dynamic-batch-size {MOVED} --balance-by-flops"

_EXPERTS = "--num-experts 4 --moe-router-topk 2 --moe-router-load-balancing-type"
MODELS = {
    "dense": "",
    "experts": f"{_EXPERTS} none",
    "router losses": f"{_EXPERTS} aux_loss --moe-aux-loss-coeff 1e-2 --moe-z-loss-coeff 1e-3",
    "prediction": "--mtp-num-layers 1 --mtp-loss-scaling-factor 0.3",
}
MEANS = ("router losses", "prediction")
"""Models with losses that are means over a micro-batch: stock's where micro-batches are stock's and hold no padding."""


@dataclass(frozen=True)
class Layout:
    flags: str
    num_ranks: int
    model: str = "dense"
    refused: str = ""


ONE_RANK = "one rank"
_TP2 = "--tensor-model-parallel-size 2"
_PP2 = "--pipeline-model-parallel-size 2"
_EP2 = "--expert-model-parallel-size 2"
_DISPATCHER = "--moe-token-dispatcher-type"

LAYOUTS = {
    "DP2": Layout("", 2),
    "DP4": Layout("", 4),
    "DP2 TP2": Layout(_TP2, 4),
    "DP2 TP2 SP": Layout(f"{_TP2} --sequence-parallel", 4),
    "DP2 CP2": Layout("--context-parallel-size 2", 4),
    "DP2 PP2": Layout(_PP2, 4),
    "DP2 PP2 VPP2": Layout(f"{_PP2} --num-layers-per-virtual-pipeline-stage 1", 4),
    "PP3": Layout("--pipeline-model-parallel-size 3 --pipeline-model-parallel-layout Et|tt|tL", 3),
    "PP4": Layout("--pipeline-model-parallel-size 4", 4),
    "DP2 TP2 PP2": Layout(f"{_TP2} {_PP2}", 8),
    "DP2 EP2": Layout(f"{_EP2} {_DISPATCHER} alltoall", 2, model="experts"),
    "DP2 EP2 router losses": Layout(f"{_EP2} {_DISPATCHER} alltoall", 2, model="router losses"),
    "DP2 prediction": Layout("", 2, model="prediction"),
    "DP2 EP2 allgather": Layout(f"{_EP2} {_DISPATCHER} allgather", 2, model="experts", refused=_DISPATCHER),
}

DYNAMIC = ("DP2 CP2", "DP4", "DP2 PP2", "DP2 TP2 SP")
"""Layouts that train with `--balance-dynamic-cp` as well."""

DOCUMENTS = ("--sft", "--dataloader-inter-document-masking")
PADDED_ROWS = "--eod-mask-loss"
DATA = (*DOCUMENTS, PADDED_ROWS)
BY_MICROBATCH = ("DP2", "DP2 TP2 PP2", "DP2 EP2")
"""Layouts that train without `--calculate-per-token-loss` as well."""

PADDED = ("DP2", "DP2 TP2", "PP3")
"""Layouts that train with `--balance-unpad` as well, on rows that the script knows no sequences of."""


@dataclass(frozen=True)
class Case:
    layout: str
    data: str
    balanced: bool = False
    model: str = "dense"
    launched: bool = False
    dynamic: bool = False
    by_microbatch: bool = False  # without --calculate-per-token-loss

    @property
    def name(self) -> str:
        parts = (self.layout, self.data, "balanced" if self.balanced else "stock")
        variants = [*(["dynamic sizes"] if self.dynamic else []), *(["torchrun"] if self.launched else [])]
        variants += ["means of micro-batches"] if self.by_microbatch else []
        return " / ".join((*parts, *variants))

    @property
    def num_ranks(self) -> int:
        return 1 if self.layout == ONE_RANK else LAYOUTS[self.layout].num_ranks

    @property
    def stock(self) -> Case:
        """The same layout and data without balancing."""
        return replace(self, balanced=False, launched=False, dynamic=False)

    @property
    def on_one_rank(self) -> Case:
        """The same model and data on one rank, without balancing."""
        return Case(ONE_RANK, self.data, model=self.model)

    def flags(self, data: PretrainData) -> list[str]:
        # Documents as long as a row: a micro-batch of one is stock's.
        data = replace(data, documents=data.full) if self.model in MEANS else data
        parts = [COMMON, MODELS[self.model], *data_flags(self.data, data)]
        parts += [LAYOUTS[self.layout].flags] if self.layout != ONE_RANK else []
        parts += [f"--balance-unpad {PADDING}"] if self.balanced and self.data == PADDED_ROWS else []
        parts += ["--balance-loss-weighting micro-batch"] if self.balanced and self.by_microbatch else []
        if self.dynamic:
            parts.append(f"{BALANCED} --max-tokens-per-gpu {MAX_TOKENS_DYNAMIC} --balance-dynamic-cp")
        elif self.balanced and self.model in MEANS:
            parts.append(MOVED)
        elif self.balanced:
            parts.append(f"{BALANCED} --max-tokens-per-gpu {MAX_TOKENS}")
        return " ".join(parts).split()


def cases(only: Sequence[str] = ()) -> Iterator[Case]:
    """The balanced runs; of `only` their names hold one, where there are any."""
    padded = [Case(name, PADDED_ROWS, balanced=True) for name in PADDED]
    yield from (case for case in padded if not only or any(text in case.name for text in only))
    for data in DOCUMENTS:
        every = [
            Case(name, data, balanced=True, model=layout.model)
            for name, layout in LAYOUTS.items()
            if layout.model not in MEANS or data == DOCUMENTS[-1]  # rows of conversations have padding
        ]
        every += [Case(name, data, balanced=True, model=LAYOUTS[name].model, dynamic=True) for name in DYNAMIC]
        every.append(Case("DP2", data, balanced=True, launched=True))
        every += [
            Case(name, data, balanced=True, model=LAYOUTS[name].model, by_microbatch=True) for name in BY_MICROBATCH
        ]
        yield from (case for case in every if not only or any(text in case.name for text in only))


def data_flags(kind: str, data: PretrainData) -> list[str]:
    cache = f"--data-cache-path {data.documents.parent / 'cache'}"
    if kind == "--sft":
        tokenizer = f"--tokenizer-type SFTTokenizer --tokenizer-model {data.tokenizer}"
        files = f"--data-path {data.conversations} {tokenizer} --sft-tokenizer-prompt-format default"
        return f"{kind} {files} {cache}".split()
    documents = data.padded if kind == PADDED_ROWS else data.documents
    return f"{kind} --data-path {documents} {cache}".split()
