"""Plans the same global batches under each policy, and judges all of them by one cost model.

`compare --help` describes the policies.

Invariants: one cost judges all policies; each is planned with the cost that its flags select in training. All figures
come from plans of these very batches by the printed flags. No policy changes the order of the data. None is compared
that the run's own options refuse.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from megatron_balance.cli.costs import CompareCosts
from megatron_balance.cost.model import CostModel
from megatron_balance.cost.rates import GPUS_PER_NODE
from megatron_balance.mcore.setup.flags import parse_flags
from megatron_balance.mcore.setup.rules import problems
from megatron_balance.planner import build_data_schedule, resolve_objective
from megatron_balance.record import RunInfo, StepRecord
from megatron_balance.report.figures import PolicyFigures
from megatron_balance.topology import Limits, Topology

_MEANS = (
    *("step_imbalance", "unavoidable_waiting", "padding_fraction", "num_microbatches", "mean_cp_size"),
    "computed_tokens",
)


class Policy(NamedTuple):
    """One way to divide a global batch: training flags, none for stock (it does not pack), and the cost evened out."""

    name: str
    flags: str
    cost_model: CostModel
    move_samples: bool = True
    dynamic_cp: bool = False
    shares: bool = False


@dataclass(frozen=True, eq=False, kw_only=True)
class PolicyResult(PolicyFigures):
    """All global batches under one policy, judged by the cost that judges every policy."""

    policy: Policy
    info: RunInfo  # ranks and cost that its plans are judged by

    @property
    def time(self) -> float:
        """Predicted, of all steps; in the unit of its scale, of one GPU."""
        return float(self.times.sum())

    def speedup(self, baseline: PolicyResult) -> float:
        """Time of another policy over that of this one."""
        return baseline.time / self.time if self.time else 1.0

    def line(self, *, stock: PolicyResult, bounds: Sequence[int] | None = None) -> dict[str, Any]:
        """Its figures beside those of stock, as a line of a record; `bounds` are those of samples, for stock rows."""
        num_tokens, per_step = sum(int(step.lengths.sum()) for step in self.steps), self.time / len(self.steps)
        over = [step.predicted_cost / bound for step, bound in zip(self.metrics, bounds or (), strict=False) if bound]
        is_known = self.scale.unit == "s" and per_step > 0
        return {
            "kind": "policy",
            "name": self.policy.name,
            "flags": self.policy.flags,
            "seconds_per_step": per_step if is_known else None,
            "tokens_per_second_per_gpu": num_tokens / self.time / self.info.topology.num_gpus if is_known else None,
            "cost_per_gpu": None if is_known else per_step,  # FLOPs or tokens of the slowest, of any policy comparable
            "speedup": self.speedup(stock),
            "imbalance": float(self.imbalance.mean()),
            **{name: self.mean(name) for name in _MEANS},
            "over_bound": (float(np.mean(over)) if over else self.mean("over_bound")) - 1,
            "cap_headroom": self.least_headroom,
            "plan_ms": float(np.mean([step.plan_seconds for step in self.steps])) * 1e3,
        }


@dataclass(frozen=True, eq=False)
class Comparison:
    """What is compared: costs, ranks at one size, and the token cap; the environment is for people."""

    costs: CompareCosts
    topology: Topology
    limits: Limits
    environment: Mapping[str, Any]
    shares: bool = False  # it is known what samples share

    def policies(self) -> tuple[list[Policy], list[str]]:
        """Stock, then policies by rising number of flags, dynamic CP last; and why others are not compared."""
        costs, tokens, dynamic = self.costs, CostModel.tokens(), replace(self.topology, dynamic_cp=True)
        flags = f"--use-dynamic-batch-size --max-tokens-per-gpu {self.limits.max_tokens_per_gpu}"
        policies = [Policy("stock", "", tokens), Policy("packed", flags, tokens, move_samples=False)]
        flags += " --balance-data"
        policies.append(Policy("balance-data", flags, tokens))
        flags += " --balance-by-flops"
        if costs.name == "flops" or costs.shape is not None:
            policies.append(Policy("by-flops", flags, costs.on(self.topology, name="flops").model))
        if costs.name == "seconds":
            flags = flags.partition(" --balance-by-flops")[0] + f" --balance-cost {costs.cost or 'seconds.json'}"
            policies.append(Policy("calibrated", flags, costs.on(self.topology, name="seconds").model))
        reasons: list[str] = []
        if self.shares:
            sharing = f"{policies[-1].flags} --balance-share-prefixes"
            policies.append(policies[-1]._replace(name="share-prefixes", flags=sharing, shares=True))
        if costs.name != "tokens":
            flags += " --balance-dynamic-cp"
            if not costs.knows_exchange(dynamic):
                reasons.append("dynamic CP is not compared: what its ranks would receive is not known: add --model")
            else:
                policies.append(Policy("dynamic-cp", flags, costs.on(dynamic).model, dynamic_cp=True))
        refusals = {policy.name: problems(self.options(policy))[:1] for policy in policies[1:]}
        reasons += [f"{name} is not compared: {problem}" for name, first in refusals.items() for problem in first]
        return [policy for policy in policies if not refusals.get(policy.name)], reasons

    def options(self, policy: Policy) -> dict[str, Any]:
        """The options of a run under a policy, as far as they are known."""
        shape, ranks = self.costs.shape, self.topology
        sizes = {
            "tensor_model_parallel_size": ranks.tp_size,
            "pipeline_model_parallel_size": ranks.pp_size,
            "context_parallel_size": ranks.cp_size,
            "expert_model_parallel_size": ranks.ep_size,
            "expert_tensor_parallel_size": ranks.etp_size,
            "use_megatron_fsdp": ranks.fully_sharded,
            "calculate_per_token_loss": True,
            "bf16": policy.shares,  # kernels that merge take no fp32
        }
        fields = {} if shape is None else vars(shape)  # they have the names of Megatron's options
        flags = vars(parse_flags(policy.flags.split())[0])
        # Attention's rate is of FLOPs, which judge policies that plan by tokens as well.
        return {**fields, **sizes, **flags, **self.costs.script_options, "balance_attention_rate": None}

    def command(self, policy: Policy) -> str:
        """The command that trains under a policy."""
        gpus = self.topology.num_gpus
        nodes = f"--nnodes {-(-gpus // GPUS_PER_NODE)} " if gpus > GPUS_PER_NODE else ""
        # Megatron's default, allgather, is refused where experts are spread over replicas.
        is_spread = self.topology.ep_dp_size > 1 and "moe_token_dispatcher_type" not in self.options(policy)
        return (
            f"torchrun {nodes}--nproc-per-node {min(gpus, GPUS_PER_NODE)} -m megatron_balance.launch YOUR_SCRIPT … "
            f"--calculate-per-token-loss {'--moe-token-dispatcher-type alltoall ' if is_spread else ''}{policy.flags}"
        )

    def plan(self, policy: Policy, batches: Sequence[StepRecord]) -> Iterator[StepRecord]:
        """Plan every global batch under a policy."""
        topology = replace(self.topology, dynamic_cp=policy.dynamic_cp)
        for iteration, batch in enumerate(batches, start=1):
            if not policy.flags:
                yield replace(batch, topology=self.topology, iteration=iteration).stock()
                continue
            started = time.perf_counter()
            schedule = build_data_schedule(
                batch.segments,
                num_segments=batch.num_segments,
                image_patches=batch.images,
                cost_model=policy.cost_model,
                topology=topology,
                limits=self.limits,
                home_ranks=batch.home_ranks,
                forest=batch.forest if policy.shares else None,
                move_samples=policy.move_samples,
            )
            seconds = time.perf_counter() - started
            rows = {"rows": batch.rows, "row_tokens": batch.row_tokens}
            yield StepRecord.from_schedule(schedule, iteration=iteration, plan_seconds=seconds, **rows)

    def judge(self, policy: Policy, steps: Sequence[StepRecord]) -> PolicyResult:
        """The plans of a policy, judged as those of all others."""
        topology = steps[0].topology
        info = RunInfo(
            cost_model=self.costs.on(topology).model,
            cost_name=self.costs.name,
            topology=topology,
            limits=self.limits,
            objective=resolve_objective("auto", topology=topology),
            policy=policy.flags or "stock",
            environment={**self.environment, "command": self.command(policy)},
            row_tokens=steps[0].row_tokens,
        )
        fields = {name: getattr(info, name) for name in ("cost_model", "limits", "objective")}
        judged = [replace(step, **fields) for step in steps]
        return PolicyResult(judged, self.costs.scale(topology), policy=policy, info=info)


def parsed_flags(flags: Sequence[str]) -> dict[str, Any]:
    """A training script's options by the names under which argparse stores them.

    Megatron's parser is not needed: a flag without a value is true, and so one that begins with `--no-` is false.
    """
    options: dict[str, Any] = {}
    for flag in f" {' '.join(flags)}".split(" --")[1:]:
        words = re.split(r"[\s=]+", flag.strip())
        name, values = words[0].replace("-", "_"), [_value(word) for word in words[1:]]
        options[name] = values if len(values) > 1 else (*values, True)[0]
        if name.startswith("no_"):
            options[name.removeprefix("no_")] = False
    return options


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text
