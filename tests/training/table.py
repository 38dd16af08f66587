"""What is trained: model, data, layouts and features, a row a run that must equal a stock run.

To try another model or feature, add a row to rows.toml. A `Row` names flags and, where a CPU needs it, functions of
tests/kit that are called in each rank before training (`watched_steps.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomllib

StandIns = tuple[tuple[str, Mapping[str, Any]], ...]

NUM_STEPS = 3
GLOBAL_BATCH_SIZE = 16
SEQ_LENGTH = 256
CAP = 256

MOE = "--num-experts 4 --moe-router-topk 2 --moe-token-dispatcher-type alltoall --moe-router-load-balancing-type none"
EXPERTS = f"{MOE} --moe-ffn-hidden-size 16 --moe-shared-expert-intermediate-size 16"
SIGMOID = "--moe-router-score-function sigmoid --moe-layer-freq [0]*1+[1]*1"
TABLE = tomllib.loads((Path(__file__).parent / "models.toml").read_text())
FAMILIES = {
    name: flags.format(MOE=MOE, EXPERTS=EXPERTS, SIGMOID=SIGMOID).strip() for name, flags in TABLE["families"].items()
}
MODELS = {"dense": "", "moe": MOE} | FAMILIES
COMMON = (
    "--hidden-size 32 --num-attention-heads 4 --num-query-groups 2 --ffn-hidden-size 64 --num-layers 2 "
    f"--seq-length {SEQ_LENGTH} --max-position-embeddings {SEQ_LENGTH} --global-batch-size {GLOBAL_BATCH_SIZE} "
    f"--train-iters {NUM_STEPS} --eval-interval 2 --eval-iters 2 --train-data-path {{data}}/train.jsonl "
    "--valid-data-path {data}/valid.jsonl"
)
"""One model, one data set; evaluated after the second step and at the end."""

LAYOUTS = TABLE["layouts"]
"""Flags and number of ranks."""

PACKED = f"--use-dynamic-batch-size --max-tokens-per-gpu {CAP}"
MOVED = "--balance-data"
BY_TOKENS = f"{PACKED} {MOVED}"
BY_FLOPS = f"{BY_TOKENS} --balance-by-flops"
ALONE = BY_FLOPS.replace(f"{CAP}", "8") + " --no-balance-evaluation"
"""Each sample is a micro-batch, as in stock runs."""
DYNAMIC_CP = BY_FLOPS.replace(f"{CAP}", f"{CAP // 2}") + " --balance-dynamic-cp"
WEIGHTED = "--balance-loss-weighting micro-batch"
RECORDED = "--balance-record {run}/record"


@dataclass(frozen=True)
class Row:
    """A balanced run and the stock run that it must equal."""

    name: str
    layout: str
    balance: str = BY_FLOPS  # flags of the balanced run alone
    model: str = "dense"
    flags: str = ""  # of both runs
    precision: str = "fp32"
    stand_ins: StandIns = ()  # of both runs
    ours: StandIns = ()  # of the balanced run alone
    slow: bool = False  # left to `make test-all`
    multiple: int = 1  # of which are the tokens of every balanced micro-batch

    @property
    def cap(self):
        """Tokens of a micro-batch of several samples, on each of its context-parallel ranks."""
        cap = self.balance.partition("--max-tokens-per-gpu ")[2].split()
        return int(cap[0]) if cap else None

    @property
    def dynamic(self):
        return "--balance-dynamic-cp" in self.balance

    @property
    def without(self):
        """Common flags that both runs do without."""
        left_out = {"--multi-latent-attention": "--group-query-attention", "--squared-relu": "--swiglu"}
        per_token = ["--calculate-per-token-loss"] if "--balance-loss-weighting" in self.balance else []
        return [left_out[flag] for flag in self.stock.split() if flag in left_out] + per_token

    @property
    def num_ranks(self):
        return LAYOUTS[self.layout][1]

    @property
    def evaluates(self):
        stock = self.dynamic or "--sft" in self.flags or "--no-balance-evaluation" in self.balance
        return not stock and self.cap is not None

    @property
    def num_chunks(self):
        """Of the model on a pipeline stage, each of which reads the data of a stock run."""
        return 2 if "virtual" in self.stock or "pipeline-model-parallel-layout" in self.stock else 1

    @property
    def stock(self):
        return f"{COMMON} {LAYOUTS[self.layout][0]} {MODELS[self.model]} {self.flags}"


RECOMPUTED = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
SHARDED = "--bf16 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
MTP_FLAGS = "--mtp-num-layers 1 --mtp-loss-scaling-factor 0.3"
OVERLAP = "--bf16 --expert-model-parallel-size 2 --overlap-moe-expert-parallel-comm"
ROUTER_LOSSES = (
    "--moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1 --moe-z-loss-coeff 1e-2 "
    "--moe-router-enable-expert-bias --moe-router-score-function sigmoid --moe-router-bias-update-rate 0.1"
)
WEAK_ROUTER_LOSSES = (
    "--moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-9 --moe-z-loss-coeff 1e-9 "
    "--moe-per-layer-logging"
)
WHOLE_SETS = "--full-validation --multiple-validation-sets --valid-data-path {data}/valid.jsonl {data}/odd.jsonl"


def fp8(recipe):
    """Settings of this recipe."""
    settings = {"fp8": "hybrid", "fp8_recipe": recipe}
    if recipe == "nvfp4":
        settings = {"fp4": "e2m1", "fp4_recipe": recipe}
    return (("stand_ins:precision_settings", {"settings": settings}),)


WORDS = {name: word for name, word in globals().items() if isinstance(word, str)} | {"data": "{data}", "run": "{run}"}


def row(*, stand_ins=(), ours=(), **columns):
    """A row of rows.toml; `fp8:RECIPE` among its stand-ins is one of settings."""
    calls = (
        [fp8(name[4:])[0] if name.startswith("fp8:") else (name, {}) for name in names] for names in (stand_ins, ours)
    )
    texts = {key: text.format_map(WORDS) if isinstance(text, str) else text for key, text in columns.items()}
    return Row(**texts, **dict(zip(("stand_ins", "ours"), map(tuple, calls), strict=True)))


ROWS = [row(**columns) for columns in tomllib.loads((Path(__file__).parent / "rows.toml").read_text())["row"]]
FAMILY_ROWS = [row for row in ROWS if row.model in FAMILIES and "--balance-loss-weighting" not in row.balance]

ROLLOUTS = "--train-data-path {data}/rollouts.jsonl --valid-data-path {data}/rollouts-valid.jsonl"
SHARED = f"{BY_FLOPS} --balance-share-prefixes"
SMALL_BLOCKS = ("stand_ins:small_blocks", {})
UP_PROJECTION = "--recompute-granularity selective --recompute-modules mla_up_proj core_attn"
BY_TOKEN = ROUTER_LOSSES.replace("--moe-aux-loss-coeff 1 ", "--moe-aux-loss-coeff 0 ")
"""Those that do not depend on the samples that share a micro-batch."""


def sharing(name, layout, flags="", *, model="dense", balance=SHARED, ours=(), **others):
    """A row whose samples begin alike."""
    return Row(name, layout, balance, model, f"{flags} {ROLLOUTS}", ours=(SMALL_BLOCKS, *ours), **others)


SHARED_ROWS = [
    sharing("verified", "DP2", balance=f"{SHARED} --balance-verify {RECORDED}"),
    sharing("recomputed", "TP2-PP2", RECOMPUTED),
    sharing("router-losses", "EP2", BY_TOKEN, model="moe"),
    sharing("up-projection", "DP2", UP_PROJECTION, model="DeepSeek-V3", balance=f"{SHARED} {WEIGHTED}"),
    sharing("sharded-bf16", "DP2", SHARDED, precision="bf16", slow=True),
    sharing("learned-positions", "DP2", "--position-embedding-type learned_absolute", slow=True),
    sharing("core-recomputed", "TP2-SP", "--recompute-granularity selective --recompute-modules core_attn", slow=True),
    sharing("dense", "PP2", slow=True),
    sharing("costs-found", "DP2", balance=f"{SHARED} --balance-cost auto:2", slow=True),
    sharing("recomputed", "PP2-VPP2", RECOMPUTED, slow=True),
    sharing("moe", "TP2-EP2", model="moe", slow=True),
    sharing("DeepSeek-V3", "EP2", RECOMPUTED, model="DeepSeek-V3", slow=True),
    sharing("GLM-4.5", "DP2", model="GLM-4.5", stand_ins=(("families:kernels", {}),), slow=True),
    sharing("filled-up", "TP2-SP", ours=(("stand_ins:filler", {}),), multiple=128, slow=True),
]
