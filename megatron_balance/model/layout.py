"""Splits the layers of a model among pipeline stages and their chunks, as Megatron does.

A stage holds `vpp_size` chunks; micro-batches pass chunk 0 of every stage, then chunk 1, and so on, so that chunk i in
this order is on stage `i % pp_size`. The embedding is on the first one and costs nothing here; the output layer, once
more for each depth of multi-token prediction, is on the last one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

from megatron_balance.errors import BalanceError
from megatron_balance.model.flops import Chunk

if TYPE_CHECKING:
    from megatron_balance.model.shape import ModelShape


@dataclass(frozen=True)
class PipelineLayout:
    """The layers of each chunk of a pipeline.

    Attributes:
        pp_size: stages.
        num_layers: `[pp_size * vpp_size]` decoder layers of each chunk, in the order in which micro-batches pass them.
        mtp_chunk: the chunk with the layers of multi-token prediction, counted from the end if negative.

    Raises:
        BalanceError: the chunks are no multiple of the stages.

    Examples:
        >>> PipelineLayout.even_split(10, pp_size=4).num_layers  # the last stage has the output layer as well
        (3, 3, 2, 2)
    """

    pp_size: int
    num_layers: tuple[int, ...]
    mtp_chunk: int = -1

    def __post_init__(self) -> None:
        if not self.num_layers or len(self.num_layers) % self.pp_size or min(self.num_layers) < 0:
            raise BalanceError(
                f"PipelineLayout.num_layers is {self.num_layers}: it must have as many chunks for each of "
                f"{self.pp_size} stages, and no negative number of layers."
            )

    @classmethod
    def even_split(cls, num_layers: int, *, pp_size: int, vpp_size: int = 1) -> PipelineLayout:
        """As many layers on each chunk; where they do not divide, one more on the first ones."""
        chunks = pp_size * vpp_size
        return cls(pp_size, tuple(num_layers // chunks + (chunk < num_layers % chunks) for chunk in range(chunks)))

    @classmethod
    def from_options(cls, options: Mapping[str, Any], *, shape: ModelShape) -> PipelineLayout | None:
        """The layout that Megatron's validated options choose; None for one stage, or a split that Megatron refuses.

        Args:
            options: arguments by name (`--pipeline-model-parallel-layout`, `--decoder-first-pipeline-num-layers`,
                `--account-for-loss-in-pipeline-split` …), or the fields of a TransformerConfig.
            shape: the model. `|` in its hybrid pattern separates chunks.
        """
        stages = options.get("pipeline_model_parallel_size") or 1
        # Validation moves the second name to the first, and counts the chunks of layouts and patterns itself.
        names = ("virtual_pipeline_model_parallel_size", "num_virtual_stages_per_pipeline_rank")
        vpp_size = next((options[name] for name in names if options.get(name)), 1)
        layout, pattern = options.get("pipeline_model_parallel_layout"), shape.hybrid_layer_pattern.split("/")[0]
        mtp_chunk = -1
        if layout:
            layout = getattr(layout, "input_data", layout)  # a TransformerConfig has parsed it
            rows = _expand(layout).split("|") if isinstance(layout, str) else layout
            kinds = [[str(getattr(layer, "name", layer)) for layer in row] for row in rows]
            num_layers = [row.count("t") + row.count("decoder") for row in kinds]
            mtp_chunk = next((chunk for chunk, row in enumerate(kinds) if {"m", "mtp"} & {*row}), -1)
        elif "|" in pattern:
            num_layers = [len(segment) for segment in pattern.split("|")]
        else:
            num_layers = _split(options, shape.num_layers, stages=stages, num_chunks=stages * vpp_size)
        if stages == 1 or len(num_layers) % stages or sum(num_layers) != shape.num_layers or min(num_layers) < 0:
            return None
        return cls(stages, tuple(num_layers), mtp_chunk)

    def alternatives(self, shape: ModelShape) -> dict[str, PipelineLayout]:
        """Splits with fewer layers beside the output layer, by the flag to set; none for a hybrid model's pattern."""
        result: dict[str, PipelineLayout] = {}
        chunks = len(self.num_layers)
        for last in range(0 if shape.hybrid_layer_pattern else shape.num_layers // chunks + 1):
            counts = PipelineLayout.even_split(shape.num_layers - last, pp_size=chunks - 1).num_layers
            text = f"E{'|'.join(f't*{count}' for count in counts)}|t*{last}{'m' * shape.mtp_num_layers}L"
            layout = PipelineLayout(self.pp_size, (*counts, last))
            result[f"--pipeline-model-parallel-layout '{text.replace('t*0', '')}'"] = layout
        return result

    def chunks(self, shape: ModelShape) -> list[Chunk]:
        """What each chunk runs; the layers must be those of the model."""
        if sum(self.num_layers) != shape.num_layers:
            raise BalanceError(
                f"PipelineLayout.num_layers is {self.num_layers}: the model has {shape.num_layers} layers."
            )
        layers, last, depths = shape.layers(), len(self.num_layers) - 1, shape.mtp_num_layers
        result: list[Chunk] = []
        for index, (first, end) in enumerate(pairwise(accumulate(self.num_layers, initial=0))):
            has_mtp = index == self.mtp_chunk % (last + 1)
            result.append(
                Chunk(
                    layers[first:end] + (layers[shape.num_layers :] if has_mtp else ()),
                    mtp_projections=depths * has_mtp,
                    output_layers=(1 + depths) * (index == last),
                    has_encoder=index == 0,
                )
            )
        return result


def _expand(layout: str) -> str:
    """The string of `--pipeline-model-parallel-layout` with its repetitions, `x*n` and `(xy)*n`, written out."""
    layout, before = layout.replace(",", ""), ""
    while layout != before:
        before = layout
        layout = re.sub(r"(?:\(([^()]*)\)|(.))\*(\d+)", lambda part: (part[1] or part[2]) * int(part[3]), layout)
    return layout


def _split(options: Mapping[str, Any], num_layers: int, *, stages: int, num_chunks: int) -> list[int]:
    """Layers of each chunk where counts decide: those of the first and the last stage, and ends that count as one."""

    def get(*names: str) -> Any:
        return next((options[name] for name in names if options.get(name)), 0)

    first = get("decoder_first_pipeline_num_layers", "num_layers_in_first_pipeline_stage")
    last = get("decoder_last_pipeline_num_layers", "num_layers_in_last_pipeline_stage")
    embedding, loss = (bool(get(f"account_for_{end}_in_pipeline_split")) for end in ("embedding", "loss"))
    middle = max(stages - bool(first) - bool(last), 1)
    each = (num_layers + embedding + loss - first - last) // middle
    result = [count * stages // num_chunks for count in (first or each, *[each] * (stages - 2), last or each)]
    result *= num_chunks // stages
    result[0] -= embedding
    result[-1] -= loss
    return result
