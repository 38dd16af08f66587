"""Memory of a micro-batch on a GPU, and the largest micro-batch that fits.

    bytes of a stage = static (weights, gradients, optimizer) + bytes per token * tokens of the micro-batch on this GPU

Every term grows with tokens alone: flash attention keeps nothing that grows with L², so one number of tokens is the
cap of a micro-batch whatever samples are in it. For each pipeline stage, per token:

    kept       what its layers keep (`memory_activations.py`), for every micro-batch that is under way: pp - stage of
               them under 1F1B; `2(pp - stage - 1) + (vpp - 1) g + 1` chunks of a 1/(pp vpp) of the layers when
               interleaved, g = microbatch_group_size_per_vp_stage (Korthikanti et al. 2022, section 4.2.3, is the case
               stage 0, g = pp: `1 + (pp-1)/(pp vpp)` times the layers)
    full       under `--recompute-granularity full` a layer keeps its input alone, 2h bytes, and one stretch of
               layers everything, while it is run again
    logits     last stage: `4 V/tp` for each fp32 softmax that the vocabulary-parallel loss keeps, one and one more for
               each multi-token-prediction depth, and `b V/tp` of logits, or of their gradient, in the activations' type
    workspace  the gradients of a layer that is run backward; the layers' or the logits' is at its peak, not both

The model is an estimate from formulas; docs/memory.md has its measured error. The budget's reserve covers what it
leaves out (communication buffers, kernels' workspaces, fragmentation).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from megatron_balance.errors import BalanceError
from megatron_balance.memory.activations import (
    RECOMPUTED_MODULES,
    backward_workspace,
    bytes_per_token,
    kept_by_layer,
    norm_kept,
)
from megatron_balance.memory.precision import Precision
from megatron_balance.memory.weights import Weights, embedding_weights, layer_weights, mtp_weights, weight_bytes
from megatron_balance.model.layers import Layer
from megatron_balance.model.shape import ModelShape
from megatron_balance.topology import Topology

GIB = 2**30

INPUT_BYTES = 28
"""A token of a micro-batch that is under way: token, label and position in int64, loss mask in fp32."""

LOSS_BYTES = 9
"""A token in the vocabulary-parallel loss: position of its label, in int64, and a flag for labels of this rank."""


@dataclass(frozen=True, kw_only=True)
class TrainingMemory:
    """Settings of a run that its memory depends on, beside the sizes of the model and the ranks.

    Attributes:
        precision: bytes of a number.
        distributed_optimizer: `--use-distributed-optimizer`.
        untied_embeddings: `--untie-embeddings-and-output-weights`.
        recompute_granularity: None, `selective` or `full`.
        recompute_modules: of `selective`; those not in RECOMPUTED_MODULES change nothing here.
        recompute_method: of `full`: `uniform` or `block`.
        recompute_num_layers: of `full`: layers of a stretch, or under `block` the layers of a stage that are
            recomputed.
        expert_imbalance: tokens of the fullest expert-parallel rank over the mean, assumed.

    Raises:
        BalanceError: a name is unknown or a number too small.
    """

    precision: Precision = field(default_factory=Precision)
    distributed_optimizer: bool = False
    untied_embeddings: bool = True
    recompute_granularity: str | None = None
    recompute_modules: frozenset[str] = frozenset({"core_attn"})
    recompute_method: str = "uniform"
    recompute_num_layers: int = 1
    expert_imbalance: float = 1.5

    def __post_init__(self) -> None:
        if self.recompute_granularity not in (None, "selective", "full"):
            raise BalanceError(
                f"recompute_granularity is {self.recompute_granularity!r}: it must be None, selective or full."
            )
        if self.recompute_method not in ("uniform", "block"):
            raise BalanceError(f"recompute_method is {self.recompute_method!r}: it must be uniform or block.")
        if self.recompute_num_layers < 1:
            raise BalanceError(f"recompute_num_layers is {self.recompute_num_layers}: it must be at least 1.")
        if self.expert_imbalance < 1:
            raise BalanceError(f"expert_imbalance is {self.expert_imbalance}: it must be at least 1 (even).")

    @property
    def dropped(self) -> frozenset[str]:
        """Modules that selective recomputation drops."""
        if self.recompute_granularity != "selective":
            return frozenset()
        return self.recompute_modules & frozenset(RECOMPUTED_MODULES)


@dataclass(frozen=True, kw_only=True)
class StageMemory:
    """One pipeline stage, on one GPU.

    Attributes:
        stage: from 0.
        static_bytes: weights, gradients and optimizer.
        layer_bytes_per_token: what layers keep for their backward passes, of all micro-batches under way.
        logits_bytes_per_token: fp32 softmax and logits; 0 but on the last stage.
        workspace_bytes_per_token: gradients beside them at the peak.
    """

    stage: int
    static_bytes: int
    layer_bytes_per_token: int
    logits_bytes_per_token: int
    workspace_bytes_per_token: int

    @property
    def bytes_per_token(self) -> int:
        """Bytes per token at the peak. Logits are freed before layers run backward, so the larger of the two counts."""
        return self.layer_bytes_per_token + max(self.logits_bytes_per_token, self.workspace_bytes_per_token)


@dataclass(frozen=True)
class MemoryModel:
    """Memory of a run, stage by stage.

    Attributes:
        stages: `[pp_size]`.

    Example:
        >>> model = memory_model(ModelShape.preset("Qwen3-8B"), topology=Topology(8, tp_size=2))
        >>> model.peak_bytes(4096) > model.static_bytes
        True
    """

    stages: tuple[StageMemory, ...]

    @property
    def static_bytes(self) -> int:
        """Static bytes of the stage that has most."""
        return max(stage.static_bytes for stage in self.stages)

    @property
    def logits_bytes_per_token(self) -> int:
        """Bytes per token of the last stage's logits."""
        return self.stages[-1].logits_bytes_per_token

    def fullest(self, tokens_per_gpu: int) -> StageMemory:
        """The stage that takes most with micro-batches of `tokens_per_gpu` tokens on a GPU."""
        return max(self.stages, key=lambda stage: stage.static_bytes + stage.bytes_per_token * tokens_per_gpu)

    def peak_bytes(self, tokens_per_gpu: int) -> int:
        """Bytes of the fullest stage, all micro-batches under way holding `tokens_per_gpu` tokens on a GPU."""
        stage = self.fullest(tokens_per_gpu)
        return stage.static_bytes + stage.bytes_per_token * tokens_per_gpu

    def max_tokens_per_gpu(self, budget_bytes: int, *, multiple: int = 1) -> int:
        """The largest number of tokens of a micro-batch on one GPU that fits; 0 where none does.

        Args:
            budget_bytes: memory of a GPU that the run may take.
            multiple: the result is a multiple of this.
        """
        fit = min((budget_bytes - stage.static_bytes) // stage.bytes_per_token for stage in self.stages)
        return max(fit, 0) // multiple * multiple


def memory_model(shape: ModelShape, *, topology: Topology, training: TrainingMemory | None = None) -> MemoryModel:
    """Build the model of a run.

    Layers are divided evenly among stages; with an uneven layout (`--pipeline-model-parallel-layout`) the result is
    off by the difference.

    Args:
        shape: the model.
        topology: the ranks.
        training: precision, optimizer and recomputation; bf16 without recomputation by default.

    Raises:
        BalanceError: there are more pipeline stages than layers.
    """
    training = training or TrainingMemory()
    pp, vpp = topology.pp_size, topology.vpp_size
    layers, num_chunks = shape.decoder_layers(), pp * vpp
    if num_chunks > len(layers):
        raise BalanceError(
            f"pp_size is {pp} and vpp_size {vpp}: the model has {len(layers)} layers, fewer than {num_chunks}."
        )
    ends = [-(-len(layers) * chunk // num_chunks) for chunk in range(num_chunks + 1)]
    chunks = [layers[start:end] for start, end in zip(ends, ends[1:], strict=False)]
    return MemoryModel(
        tuple(
            _stage(stage, chunks[stage::pp], shape=shape, topology=topology, training=training) for stage in range(pp)
        )
    )


def chunks_under_way(stage: int, *, topology: Topology) -> int:
    """Model chunks of a stage with a micro-batch whose backward pass has not run, at most. See the module."""
    after = topology.pp_size - stage - 1
    if topology.vpp_size == 1:
        return after + 1
    group = max(topology.microbatch_multiple, topology.pp_size)
    return 2 * after + (topology.vpp_size - 1) * group + 1


def _stage(
    stage: int, chunks: list[tuple[Layer, ...]], *, shape: ModelShape, topology: Topology, training: TrainingMemory
) -> StageMemory:
    is_last = stage == topology.pp_size - 1
    per_layer = {layer: _kept(layer, shape, topology, training) for layer in {*sum(chunks, ()), *shape.mtp_layers()}}
    of_input = _residual(shape, topology, training)
    under_way = chunks_under_way(stage, topology=topology)
    inputs = INPUT_BYTES * -(-under_way // topology.vpp_size)
    kept = max(_chunk(chunk, per_layer, of_input, training) for chunk in chunks) * under_way
    workspace = max(_workspace(layer, shape, topology, training) for layer in per_layer)
    # Activations and gradients in transit between neighbouring stages.
    workspace += 2 * of_input * (topology.pp_size > 1)
    if training.recompute_granularity == "full":
        longest = training.recompute_num_layers if training.recompute_method == "uniform" else 1
        workspace += max(per_layer.values()) * min(longest, max(len(chunk) for chunk in chunks))
    logits = 0.0
    if is_last:
        depths = shape.mtp_num_layers
        vocabulary = shape.padded_vocab_size / topology.tp_size
        whole = topology.tp_size if topology.sequence_parallel else 1
        last_norm = norm_kept(shape, what="last norm", precision=training.precision)
        kept += sum(tensor.num_bytes for tensor in last_norm) / whole
        # A depth's three norms, the two inputs that it joins, and its layer; recomputed, its inputs and its output.
        if training.recompute_granularity == "full":
            kept += depths * of_input * 3
        else:
            kept += depths * of_input * (6 if training.precision.fused else 9)
            kept += sum(per_layer[layer] for layer in shape.mtp_layers())
        kept += LOSS_BYTES * (1 + depths)
        cast = training.precision.activation if training.precision.activation < 4 else 0
        logits = vocabulary * (4 * (1 + depths) + cast)
    return StageMemory(
        stage=stage,
        static_bytes=_static(stage, chunks, shape=shape, topology=topology, training=training),
        layer_bytes_per_token=math.ceil(kept + inputs),
        logits_bytes_per_token=math.ceil(logits),
        workspace_bytes_per_token=math.ceil(workspace),
    )


def _kept(layer: Layer, shape: ModelShape, topology: Topology, training: TrainingMemory) -> float:
    return bytes_per_token(
        kept_by_layer(shape, layer=layer, precision=training.precision),
        topology=topology,
        recompute_modules=training.dropped,
        expert_imbalance=training.expert_imbalance,
    )


def _workspace(layer: Layer, shape: ModelShape, topology: Topology, training: TrainingMemory) -> float:
    return bytes_per_token(
        backward_workspace(shape, layer=layer, precision=training.precision),
        topology=topology,
        recompute_modules=frozenset(),
        expert_imbalance=training.expert_imbalance,
    )


def _residual(shape: ModelShape, topology: Topology, training: TrainingMemory) -> float:
    """The residual stream of a token on one GPU."""
    split = topology.tp_size if topology.sequence_parallel else 1
    return training.precision.activation * shape.hidden_size / split


def _chunk(chunk: tuple[Layer, ...], per_layer: dict[Layer, float], of_input: float, training: TrainingMemory) -> float:
    """Tensors that the layers of a chunk keep of one micro-batch."""
    if training.recompute_granularity != "full":
        return sum(per_layer[layer] for layer in chunk)
    if training.recompute_method == "uniform":
        return of_input * -(-len(chunk) // training.recompute_num_layers)
    again = chunk[: training.recompute_num_layers]
    return of_input * len(again) + sum(per_layer[layer] for layer in chunk[len(again) :])


def _static(
    stage: int, chunks: list[tuple[Layer, ...]], *, shape: ModelShape, topology: Topology, training: TrainingMemory
) -> int:
    of_layers = [layer_weights(shape, layer=layer) for layer in sum(chunks, ())]
    weights = sum(of_layers, Weights())
    is_first, is_last = stage == 0, stage == topology.pp_size - 1
    if is_first:
        weights += embedding_weights(shape)
    if is_last:
        weights += Weights(whole=shape.hidden_size)  # the last norm
        weights += mtp_weights(shape)
        # A tied output layer, and the embedding of prediction depths, are copies where the stages differ.
        if training.untied_embeddings or not is_first:
            weights += embedding_weights(shape)
        if shape.mtp_num_layers and training.untied_embeddings and not is_first:
            weights += embedding_weights(shape)
    return weight_bytes(
        weights,
        topology=topology,
        precision=training.precision,
        distributed_optimizer=training.distributed_optimizer,
        gathered=sorted(of_layers, key=lambda of_layer: of_layer.total)[-2:],
    )
