"""Plans for image-text samples: by tokens, by the language model's FLOPs alone, and with the encoder's.

    python -m benchmarks.planner.images --out benchmarks/results     # seconds

Samples are drawn, not read: a mixture made from the published sizes of the LLaVA-1.5 instruction set (Liu et al. 2023,
arXiv 2310.03744, Table 7) and the usual picture sizes of its sources. COCO's longer side is 640 pixels, Visual Genome's
mean width 500 (Krishna et al. 2016, arXiv 1602.07332), OpenImages' longer side 1024; book covers are taken as 350 by
500. How long the texts are was not published: they are drawn from the fits of megatron_balance.lengths.synthetic,
ShareGPT cut to 2048 tokens as in the paper. `documents` replaces a quarter of the samples by one to four scanned pages
of 1700 by 2200 pixels, an assumption, which shows large pictures.

Pictures become patches as Qwen2.5-VL resizes them: sides are multiples of 28, patches of 14, four a token. All plans
are judged by the FLOPs of both parts of Qwen2.5-VL-7B, encoder and language model one after the other on the same rank.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.markdown import table
from benchmarks.results_file import made_by, page_head, write_results
from megatron_balance import CostModel, Limits, ModelShape, Topology, build_data_schedule
from megatron_balance.cost.model import MICROBATCH_TOKENS
from megatron_balance.lengths.synthetic import synthetic_lengths
from megatron_balance.planner.metrics import ScheduleMetrics, assignment_metrics

COMMAND = "python -m benchmarks.planner.images --out benchmarks/results"
MODEL = "Qwen2.5-VL-7B"
CAP = 16384
SAMPLES_PER_RANK = 32
RANKS = (8, 32)
NUM_BATCHES = 8

COCO, GENOME, OPEN_IMAGES, COVER, PAGE = (640, 480), (500, 375), (1024, 768), (350, 500), (1700, 2200)

Source = tuple[int, tuple[int, int] | None, str]
"""Thousands of samples, pixels of a picture, and the fit that lengths of the texts are drawn from."""

LLAVA: tuple[Source, ...] = (
    (158, COCO, "alpaca_eval"),  # LLaVA
    (40, None, "servegen_mlarge"),  # ShareGPT
    (206, COCO, "gsm8k_sft"),  # VQAv2, OKVQA, A-OKVQA, RefCOCO
    (158, GENOME, "gsm8k_sft"),  # GQA, Visual Genome
    (80, COVER, "gsm8k_sft"),  # OCRVQA
    (22, OPEN_IMAGES, "gsm8k_sft"),  # TextCaps
)
MIXTURES = ("llava", "documents")
BOTH = "FLOPs of both"
MEETINGS = ("once a step", "in every layer")
LONGEST_TEXT = 2048


@dataclass(frozen=True)
class Batch:
    """A global batch.

    Attributes:
        lengths: `[num_samples]` tokens of text and images.
        image_patches: `[num_samples]` patches of each image.
    """

    lengths: list[int]
    image_patches: list[list[int]]


@dataclass(frozen=True)
class Row:
    """One way of planning on one setup, means over its batches.

    Attributes:
        mixture: of samples.
        dp_size: data-parallel ranks.
        meets: ranks meet in every layer (FSDP), and so between encoder and language model too.
        plan: the way.
        imbalance: cost of the busiest rank over the mean rank's.
        worst_imbalance: the largest of a batch.
        step: predicted time over that of the plan by both parts.
        over_bound: predicted time over the lower bound.
        image_share: the encoder's part of all cost.
    """

    mixture: str
    dp_size: int
    meets: bool
    plan: str
    imbalance: float
    worst_imbalance: float
    step: float
    over_bound: float
    image_share: float


def draw_batch(mixture: str, *, num_samples: int, seed: int) -> Batch:
    """A global batch of a mixture."""
    lengths: list[int] = []
    image_patches: list[list[int]] = []
    for length, pictures in draw_pictures(mixture, num_samples=num_samples, seed=seed):
        patches = [num_patches(*picture) for picture in pictures]
        lengths.append(length + sum(patches) // 4)
        image_patches.append(patches)
    return Batch(lengths, image_patches)


def draw_pictures(mixture: str, *, num_samples: int, seed: int) -> Iterator[tuple[int, list[tuple[int, int]]]]:
    """Samples of a mixture: tokens of the text, and pixels of each picture."""
    generator = np.random.default_rng(seed)
    weights = np.array([thousands for thousands, _, _ in LLAVA], dtype=float)
    sources = generator.choice(len(LLAVA), size=num_samples, p=weights / weights.sum())
    texts = {fit: synthetic_lengths(fit, num_samples=num_samples, seed=seed).tolist() for _, _, fit in LLAVA}
    for index, source in enumerate(sources.tolist()):
        _, pixels, fit = LLAVA[source]
        pictures = [] if pixels is None else [pixels]
        if mixture == "documents" and generator.random() < 0.25:
            pictures = [PAGE] * int(generator.integers(1, 5))
        yield min(texts[fit][index], LONGEST_TEXT), pictures


def write_samples(file: Path, *, mixture: str) -> None:
    """Writes batches for 8 ranks as lengths and `patches`, one sample a line."""
    batches = [draw_batch(mixture, num_samples=SAMPLES_PER_RANK * RANKS[0], seed=seed) for seed in range(NUM_BATCHES)]
    with file.open("w") as lines:
        for batch in batches:
            for length, patches in zip(batch.lengths, batch.image_patches, strict=True):
                lines.write(f"{json.dumps({'length': length, 'patches': patches})}\n")


def num_patches(width: int, height: int) -> int:
    """Patches of a picture as Qwen2.5-VL resizes it."""
    return 4 * max(round(width / 28), 1) * max(round(height / 28), 1)


def plans(cost_model: CostModel, *, topology: Topology) -> Mapping[str, Callable[[Batch], Sequence[Any]]]:
    """Ways of planning by name: batch → `ranks[dp_rank][slot]`, sample ids."""
    limits = Limits(CAP)

    def planned(model: CostModel, *, images: bool = False, **options: Any) -> Callable[[Batch], Sequence[Any]]:
        def plan(batch: Batch) -> Sequence[Any]:
            patches = batch.image_patches if images else None
            return build_data_schedule(
                batch.lengths, cost_model=model, topology=topology, limits=limits, image_patches=patches, **options
            ).ranks

        return plan

    def stock(batch: Batch) -> Sequence[Any]:
        return [
            [[sample] for sample in range(rank, len(batch.lengths), topology.dp_size)]
            for rank in range(topology.dp_size)
        ]

    def packed(batch: Batch) -> Sequence[Any]:
        homes = np.arange(len(batch.lengths)) % topology.dp_size
        return planned(CostModel.tokens(), home_ranks=homes, move_samples=False, algorithm="first_fit")(batch)

    ways = {
        "stock sampler": stock,
        "packed": packed,
        "tokens": planned(CostModel.tokens()),
        "FLOPs of the language model": planned(replace(cost_model, image_linear=0, image_quadratic=0)),
        BOTH: planned(cost_model, images=True),
    }
    if topology.fully_sharded:
        # The cheaper level of planning evens out the sum alone.
        ways[f"{BOTH}, their sum"] = planned(cost_model, images=True, level=1)
    return ways


def measure(mixture: str, *, dp_size: int, meets: bool = False) -> list[Row]:
    """All ways of planning on one setup."""
    cost_model = CostModel.from_shape(ModelShape.preset(MODEL), microbatch_tokens=MICROBATCH_TOKENS)
    topology = Topology(dp_size, fully_sharded=meets)
    batches = [draw_batch(mixture, num_samples=SAMPLES_PER_RANK * dp_size, seed=seed) for seed in range(NUM_BATCHES)]
    images = sum(cost_model.image_cost(p) for batch in batches for patches in batch.image_patches for p in patches)
    tokens = sum(cost_model(length) for batch in batches for length in batch.lengths)

    def figures(plan: Callable[[Batch], Sequence[Any]]) -> list[ScheduleMetrics]:
        return [
            assignment_metrics(
                plan(batch),
                lengths=batch.lengths,
                image_patches=batch.image_patches,
                cost_model=cost_model,
                topology=topology,
                limits=Limits(CAP),
            )
            for batch in batches
        ]

    of_plans = {name: figures(plan) for name, plan in plans(cost_model, topology=topology).items()}
    best = sum(metrics.predicted_cost for metrics in of_plans[BOTH])
    return [
        Row(
            mixture,
            dp_size=dp_size,
            meets=meets,
            plan=name,
            imbalance=statistics.fmean(metrics.step_imbalance for metrics in of_plan),
            worst_imbalance=max(metrics.step_imbalance for metrics in of_plan),
            step=sum(metrics.predicted_cost for metrics in of_plan) / best,
            over_bound=statistics.fmean(metrics.over_bound for metrics in of_plan),
            image_share=images / (images + tokens),
        )
        for name, of_plan in of_plans.items()
    ]


def report(result: Mapping[str, Any]) -> str:
    """The page."""
    rows = result["rows"]
    cells = [
        (
            *(row["mixture"], f"{row['image_share']:.0%}", row["dp_size"], MEETINGS[row["meets"]], row["plan"]),
            *(f"{row[name]:.3f}" for name in ("imbalance", "worst_imbalance", "step", "over_bound")),
        )
        for row in rows
    ]
    columns = (
        "samples | encoder's part | ranks | that meet | planned by | busiest / mean | worst batch | step | over bound"
    )
    text = "\n".join(
        [
            f"Image-text samples through {MODEL}, {SAMPLES_PER_RANK} a rank and step, cap {CAP} tokens, {NUM_BATCHES} "
            "batches each.",
            "`llava` is drawn from the published sizes of the LLaVA-1.5 instruction set, with assumed texts; in",
            "`documents` a quarter of the samples is one to four scanned pages, an assumption",
            "(`benchmarks/planner/images.py`). All plans are judged by the FLOPs of both parts; `step` is the",
            "predicted time over that of the plan by both, `over bound` its mean over the lower bound. Ranks that meet",
            "in every layer (FSDP) wait for the costliest encoder part of a micro-batch and then for the costliest",
            "language part. Nothing is measured here.",
        ]
    )
    head = page_head("Plans for image-text samples", result["command"])
    return f"{head}\n{text}\n\n{table(columns, cells, align='lrrllrrrr')}\n"


def main() -> int:
    """Plan, print, write; the exit code is 1 if planning by both parts is not the best on every setup."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.planner.images", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("build/bench"), help="folder of the results")
    parser.add_argument("--write-samples", type=Path, metavar="OUT.jsonl", help="only write samples, for compare")
    parser.add_argument("--mixture", choices=MIXTURES, default=MIXTURES[0], help="of --write-samples")
    args = parser.parse_args()
    if args.write_samples is not None:
        write_samples(args.write_samples, mixture=args.mixture)
        return 0
    rows = [
        row
        for meets in (False, True)
        for mixture in MIXTURES
        for dp_size in RANKS
        for row in measure(mixture, dp_size=dp_size, meets=meets)
    ]
    result = made_by(COMMAND, rows=[asdict(row) for row in rows])
    sys.stdout.write(write_results("images", result, report=report, out=args.out))
    return int(any(row.step < 1 for row in rows))


if __name__ == "__main__":
    sys.exit(main())
