"""Rates of attention and of all else from published tables, judged on rows that were not fitted; what they are worth.

Rates: two rows of a table of whole runs by sequence length give two rates, and the other rows judge them. Attention
kernels give one rate, the other is assumed; runs of a model with experts at one length give the other way round.
Loss: plans made by other costs, timed by each profile with an assumed time of a micro-batch, over the plan by these,
less one. `two rates` has the profile's rates, and 128 tokens a micro-batch. Under dynamic context parallelism the
exchange between nodes is what attention does not hide of it.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.planner.setups import (
    LONG_LENGTHS,
    MIXED_LENGTHS,
    Setup,
    add_length_options,
    global_batches,
    lengths_folder,
    lengths_said,
)
from benchmarks.planner.wheels import LINEAR
from benchmarks.publish import ROOT, Measured, table
from megatron_balance import CostModel, ModelShape, Topology, build_data_schedule
from megatron_balance.cost.rates import ASSUMED_TFLOPS, ATTENTION_RATES, BETWEEN_NODES, exchange_costs

TITLE = "Rates of GPUs"
PUBLISHED = Path(__file__).with_suffix(".json")
PROFILES = ROOT / "benchmarks" / "profiles.json"
WEIGHTS = (1.0, 0.4, 0.5, 0.6, 0.7, 0.8, 1.5, 2.0, 3.0)
"""Rates of attention that are tried for all devices of a kind."""

DEFAULT = "by default"
ALIKE = 0.2
"""Percent of a step: weights whose mean losses differ by less are alike; attention's rate beside experts is assumed."""

MICROBATCH_SECONDS = 0.3e-3
"""Of a micro-batch and a layer: assumed."""


def _setup(name: str, model: str, topology: Topology, cap: int, batch: int, lengths: tuple[str, ...]) -> Setup:
    options = {"global_batch_size": batch, "length_names": lengths, "num_batches": 1}
    return Setup(name, model=model, topology=topology, max_tokens_per_gpu=cap, **options)


_DENSE, _EXPERTS = "Qwen3-8B", "Qwen3-30B-A3B"
RATE_SETUPS = (
    _setup("8B, DP8", _DENSE, Topology(8), 32768, 256, LONG_LENGTHS),
    _setup("8B, DP32", _DENSE, Topology(32), 32768, 1024, LONG_LENGTHS),
    _setup("8B, DP8 CP4, 131k", _DENSE, Topology(8, cp_size=4), 32768, 256, LONG_LENGTHS),
    _setup("8B, 32 ranks, dynamic CP", _DENSE, Topology(8, cp_size=4, dynamic_cp=True), 32768, 256, LONG_LENGTHS),
    _setup("30B-A3B, DP32", _EXPERTS, Topology(32), 16384, 2048, MIXED_LENGTHS),
    _setup("30B-A3B, DP32 EP32", _EXPERTS, Topology(32, ep_size=32), 16384, 2048, MIXED_LENGTHS),
    _setup(
        "30B-A3B EP8, 32 ranks, dynamic CP",
        _EXPERTS,
        Topology(8, cp_size=4, ep_size=8, dynamic_cp=True),
        16384,
        256,
        LONG_LENGTHS,
    ),
)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--write", action="store_true", help="write profiles.json")
    add_length_options(parser)


def measure(args: argparse.Namespace) -> Measured:
    fitted = fit(json.loads(PUBLISHED.read_text()))
    if args.write:
        rows = [f' "{name}": {json.dumps(row)}' for name, row in fitted.items()]
        PROFILES.write_text("{\n" + ",\n".join(rows) + "\n}\n")
    problems = [] if json.loads(PROFILES.read_text()) == fitted else ["profiles.json is not what the tables give"]
    losses: dict[str, list[list[float]]] = {}
    setups = {setup.name: losses_of(setup, folder=lengths_folder(args), by_kind=losses) for setup in RATE_SETUPS}
    weights = {kind: dict(zip(WEIGHTS, np.mean(rows, axis=0).tolist(), strict=True)) for kind, rows in losses.items()}
    for (models, precision), rate in ATTENTION_RATES.items():
        means = weights[f"{models} {precision}"]
        best = min(means, key=lambda weight: means[weight])
        if means[rate] > means[best] + ALIKE:
            problems.append(f"ATTENTION_RATES has {rate:g} for {models} {precision} and {best:g} loses less")
    said = lengths_said(lengths_folder(args))
    return Measured({"profiles": fitted, "setups": setups, "weights": weights, "lengths": said}, problems=problems)


def profiles() -> dict[str, dict[str, Any]]:
    """Rates of one GPU in training, by name, with what their `source` says of how they were measured.

    `linear_tflops` of all that is linear in tokens and `attention_tflops` of the causal attention core are 10**12
    FLOP/s. `kind` is `end to end` (whole runs), `kernel` (attention measured, the rest assumed), `assumed attention` or
    `own run` (by `scripts/bench gpu`); `held_out` is the mean and worst relative error on rows that were not fitted.
    """
    return json.loads(PROFILES.read_text())


def fit(published: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    rows: dict[str, dict[str, Any]] = {}
    for name, sequence_table in published["sequences"].items():
        rates, held_out = fit_sequences(sequence_table)
        about = {key: sequence_table[key] for key in ("gpu", "precision", "software", "models", "source")}
        rows[name] = about | rates | {"kind": "end to end", "held_out": held_out}
    kernels = published["kernels"]
    for name, row in kernels["rows"].items():
        # Forward is 1 and backward 2.5 of 3.5 parts of the work.
        attention = round(3.5 / (1 / row["forward"] + 2.5 / row["backward"]))
        about = {"gpu": "H100", "precision": "bf16", "kernel": row["kernel"], "models": "dense"}
        rates = {"linear_tflops": kernels["linear_tflops"], "attention_tflops": attention}
        rows[name] = about | rates | {"kind": "kernel", "source": kernels["source"]}
    experts = published["experts"]
    cost = CostModel.from_shape(ModelShape.preset(experts["model"]))
    for name, row in experts["rows"].items():
        core = cost.quadratic * experts["seq_length"] / row["attention_tflops"]
        linear = round(cost.linear / (1e12 / row["tokens_per_second"] - core))
        about = {key: row[key] for key in ("gpu", "precision", "software", "source", "attention_tflops")}
        rows[name] = about | {"models": "moe", "linear_tflops": linear, "kind": "assumed attention"}
    return rows | published["measured"]


def fit_sequences(sequence_table: Mapping[str, Any]) -> tuple[dict[str, float], list[float]]:
    """Both rates from two rows; mean and worst error on the others.

    NeMo counts attention as not causal, `12*layers*h*L` a token; a causal core with FlashAttention's backward pass is
    `7*layers*h*L`.
    """
    h, layers = sequence_table["hidden"], sequence_table["layers"]
    width = 12 + 12 * sequence_table["kv_fraction"] + 18 * sequence_table["ffn"] / h
    linear = layers * h * h * width + 6 * sequence_table["vocab"] * h
    lengths = np.array([1024 * int(length) for length in sequence_table["tflops"]])
    seconds = (linear + 12 * layers * h * lengths) / (1e12 * np.array(list(sequence_table["tflops"].values())))
    features = np.stack([np.full(lengths.size, linear), 7.0 * layers * h * lengths], axis=1)
    fitted = np.isin(lengths, 1024 * np.array(sequence_table["fitted_on"]))
    inverse = np.linalg.solve(features[fitted], seconds[fitted])
    rates = {name: round(1e-12 / value) for name, value in zip(RATES, inverse, strict=True)}
    errors = np.abs(features @ inverse / seconds - 1)[~fitted]
    return rates, [round(float(errors.mean()), 4), round(float(errors.max()), 4)]


RATES = ("linear_tflops", "attention_tflops")


def losses_of(setup: Setup, *, folder: Path | None, by_kind: dict[str, list[list[float]]]) -> dict[str, list[float]]:
    """Mean and worst loss of each way of planning, percent, over the profiles of its kind of model and its batches.

    Args:
        setup: the run.
        folder: of real lengths.
        by_kind: the loss of each of `WEIGHTS`, by kind of model and precision; a row is added for a plan.
    """
    shape = ModelShape.preset(setup.model)
    models = "moe" if shape.num_experts else "dense"
    truths = [one for one in profiles().values() if one["models"] == models]
    others = {
        "tokens": CostModel.tokens(),
        "coeff*L + L²": slime_approximate(shape),
        "24576 L + L²": CostModel(linear=LINEAR, quadratic=1),
    }
    losses: dict[str, list[float]] = {}
    for batch in global_batches(setup, lengths_folder=folder):
        weighed = [_plan(batch, setup, cost_model(setup, attention=weight)) for weight in WEIGHTS]
        plans = {way: _plan(batch, setup, cost) for way, cost in others.items()} | {"FLOPs": weighed[0]}
        for truth in truths:
            rates: dict[str, Any] = {"linear": truth["linear_tflops"], "attention": truth["attention_tflops"]}
            cost = cost_model(setup, **rates, fixed=True)
            best = _seconds(_plan(batch, setup, cost), cost)
            loss_rows = [100 * (_seconds(plan, cost) / best - 1) for plan in weighed]
            if not setup.topology.dynamic_cp:  # plans of dynamic sizes differ by more than a weight does
                by_kind.setdefault(f"{models} {truth['precision']}", []).append(loss_rows)
            for way, plan in (plans | {"two rates": _plan(batch, setup, cost_model(setup, **rates))}).items():
                losses.setdefault(way, []).append(100 * (_seconds(plan, cost) / best - 1))
            losses.setdefault(DEFAULT, []).append(loss_rows[WEIGHTS.index(ATTENTION_RATES[models, truth["precision"]])])
    return {way: [statistics.fmean(percents), max(percents)] for way, percents in losses.items()}


def cost_model(setup: Setup, *, linear: float | None = None, attention: float, fixed: bool = False) -> CostModel:
    """Costs on the setup's ranks, with the fixed times of a device or with those that runs plan with.

    Args:
        setup: the run.
        linear: TFLOP/s; None where rates are not known, and only the exchange needs one.
        attention: TFLOP/s, or the weight of attention.
        fixed: with the device's own time of a micro-batch.
    """
    shape, ranks = ModelShape.preset(setup.model), setup.topology
    sharing = ranks.tp_size * (1 if ranks.dynamic_cp else ranks.cp_size)
    cost = CostModel.from_shape(shape, ep_size=ranks.ep_size, linear_tflops=linear or 1, attention_tflops=attention)
    if fixed and linear:
        seconds = MICROBATCH_SECONDS * shape.num_layers * sharing
        cost = replace(cost, per_microbatch=round(seconds * linear * 1e12))
    if not ranks.dynamic_cp:
        return cost
    exchange = exchange_costs(shape, bytes_per_second=BETWEEN_NODES, tflops=linear or ASSUMED_TFLOPS)
    return replace(cost, **exchange)


def slime_approximate(shape: ModelShape) -> CostModel:
    """`coeff*L + L²` with `coeff = 2h + e*d_ff/2`, e 3 with a gated unit, else 2.

    Source: slime pull request 2017, first version. It is `8h²L + 2e*h*d_ff*L + 4hL²` over `4h`: four projections
    of h x h, attention that computes the masked half as well, no output layer. In a MoE model `d_ff` is the
    width a token visits: the chosen experts' and the shared ones'. Every layer has full attention.
    """
    gemms = 3 if shape.gated_linear_unit else 2
    width = shape.ffn_hidden_size
    if shape.num_experts:
        width = shape.moe_router_topk * shape.moe_ffn_hidden_size + shape.moe_shared_expert_intermediate_size
    return CostModel(linear=2 * shape.hidden_size + gemms * width // 2, quadratic=1)


def _plan(batch: Any, setup: Setup, cost: CostModel) -> Any:
    return build_data_schedule(batch, cost_model=cost, topology=setup.topology, limits=setup.limits)


def _seconds(plan: Any, cost: CostModel) -> float:
    return plan.metrics(cost_model=cost).predicted_cost


def section(figures: Mapping[str, Any]) -> str:
    judged = "; ".join(
        "{} {:.1f} / {:.1f} %".format(name, *(100 * error for error in row["held_out"]))
        for name, row in figures["profiles"].items()
        if "held_out" in row
    )
    ways = list(next(iter(figures["setups"].values())))
    loss_rows = [
        (name, *("{:.2f} / {:.1f}".format(*setup_losses[way]) for way in ways))
        for name, setup_losses in figures["setups"].items()
    ]
    return f"""Two rows of a published table of whole runs give both rates of a profile
(benchmarks/profiles.json), and the other rows judge them, mean / worst error: {judged}. Loss in percent of
the step, mean / worst over the profiles of a kind of model and the batches; {figures["lengths"]}. *{DEFAULT}* is what
training takes for the kind of model and the precision, *FLOPs* what it took before; *two rates* are the profile's own.

{table("setup | " + " | ".join(ways), loss_rows)}"""
