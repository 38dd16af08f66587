"""Pipeline stages between the first and the last load and move nothing, and train as stock ones do."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
from forked_runs import train
from rounding import assert_equal
from training_run import Recorded, RunFailed

from megatron_balance import BalanceError, Topology
from megatron_balance.mcore.setup.data_stages import loads_on_every_stage
from megatron_balance.mcore.step.balanced_step import BalancedStep
from megatron_balance.mcore.step.stage_packs import stage_microbatches
from megatron_balance.samples.packing import dummy_microbatch, pack_microbatch
from megatron_balance.samples.sample import Sample, SampleSchema

NUM_STEPS = 5
FLAGS = (
    "--hidden-size 32 --num-attention-heads 4 --num-query-groups 2 --ffn-hidden-size 64 --seq-length 256 "
    f"--max-position-embeddings 256 --train-iters {NUM_STEPS} --global-batch-size 8"
)
BALANCED = "--use-dynamic-batch-size --max-tokens-per-gpu 512 --balance-data --balance-by-flops"
AT_THE_ENDS = "--no-balance-load-every-stage"
PP4 = "--num-layers 4 --pipeline-model-parallel-size 4"
PP3 = "--num-layers 3 --pipeline-model-parallel-size 3"
TP2 = "--tensor-model-parallel-size 2"
CP2 = "--context-parallel-size 2"
ROUTERS = (
    "--num-experts 4 --moe-router-topk 2 --moe-token-dispatcher-type alltoall --moe-aux-loss-coeff 0.01 "
    "--moe-router-load-balancing-type aux_loss"
)


def run(folder: Path, *flags: str, num_ranks: int, module: str = "stage_steps", **how: Any) -> Recorded:
    return train(folder, " ".join((FLAGS, *flags)).split(), num_ranks=num_ranks, module=module, **how)


def assert_only_the_ends_load(ours: Recorded) -> None:
    last = max(steps[0]["stage"] for steps in ours.ranks)
    for steps in ours.ranks:
        assert len(steps) == NUM_STEPS
        at_an_end = steps[0]["stage"] in (0, last)
        assert {"ranks" in step for step in steps} <= {at_an_end, False}
        if not at_an_end:
            assert [step["pulled"] for step in steps] == [0] * NUM_STEPS
            assert not any(step["exchanges"] for step in steps)
    assert {steps[0]["stage"] for steps in ours.ranks if steps[-1]["pulled"]} == {0, last}


LAYOUTS = [
    pytest.param(PP3, 6, id="PP3-DP2"),
    pytest.param(PP4, 4, marks=pytest.mark.slow, id="PP4"),
    pytest.param(
        "--num-layers 8 --pipeline-model-parallel-size 4 --num-layers-per-virtual-pipeline-stage 1",
        4,
        marks=pytest.mark.slow,
        id="PP4-VPP2",
    ),
    pytest.param(f"{PP4} {TP2}", 8, marks=pytest.mark.slow, id="PP4-TP2"),
    pytest.param(f"{PP3} {CP2}", 6, marks=pytest.mark.slow, id="PP3-CP2"),
    pytest.param(f"{PP3} --balance-shape-bucket 512", 3, marks=pytest.mark.slow, id="PP3-bucket"),
    pytest.param(f"{PP3} --balance-lookahead 2", 6, marks=pytest.mark.slow, id="PP3-DP2-lookahead"),
    pytest.param(f"{PP3} {ROUTERS}", 3, marks=pytest.mark.slow, id="PP3-routers"),
]


@pytest.mark.parametrize(("layout", "num_ranks"), LAYOUTS)
def test_equal_to_a_run_that_loads_on_every_stage(tmp_path: Path, layout: str, num_ranks: int) -> None:
    everywhere = run(tmp_path / "every", layout, BALANCED, num_ranks=num_ranks)
    ours = run(tmp_path / "ends", layout, BALANCED, AT_THE_ENDS, num_ranks=num_ranks)
    assert_only_the_ends_load(ours)
    assert all(steps[-1]["pulled"] for steps in everywhere.ranks if steps[-1]["exchanges"])
    for key in ("lm_loss", "grad_norm"):
        assert [step[key] for step in ours.steps] == [step[key] for step in everywhere.steps]
    for mine, theirs in zip(ours.ranks, everywhere.ranks, strict=True):
        assert [step["microbatch_tokens"] for step in mine] == [step["microbatch_tokens"] for step in theirs]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "num_ranks"), [pytest.param(PP4, 4, id="PP4"), pytest.param(f"{PP4} {TP2}", 8, id="PP4-TP2")]
)
def test_equal_to_stock(tmp_path: Path, layout: str, num_ranks: int) -> None:
    stock = run(tmp_path / "stock", layout, num_ranks=num_ranks, module="record_steps")
    assert_equal(run(tmp_path / "ours", layout, BALANCED, AT_THE_ENDS, num_ranks=num_ranks), reference=stock)


@pytest.mark.parametrize(
    ("layout", "num_ranks"),
    [
        pytest.param(PP3, 3, id="PP3"),
        pytest.param(PP4, 8, marks=pytest.mark.slow, id="PP4-DP2"),
        pytest.param(f"{PP4} {TP2}", 8, marks=pytest.mark.slow, id="PP4-TP2"),
    ],
)
def test_stages_in_between_may_have_no_data(tmp_path: Path, layout: str, num_ranks: int) -> None:
    everywhere = run(tmp_path / "every", layout, BALANCED, num_ranks=num_ranks)
    evaluated = "--dataloader-inter-document-masking --eval-iters 2 --eval-interval 2"
    ours = run(tmp_path / "ends", layout, BALANCED, evaluated, num_ranks=num_ranks, environment={"DATA": "ends"})
    assert_only_the_ends_load(ours)
    for key in ("lm_loss", "grad_norm"):
        assert [step[key] for step in ours.steps] == [step[key] for step in everywhere.steps]


@pytest.mark.slow
def test_context_parallel_sizes_of_their_own(tmp_path: Path) -> None:
    flags = f"{PP4} {CP2} --balance-context-parallel {BALANCED.replace('512', '160')}"
    everywhere = run(tmp_path / "every", flags, num_ranks=8)
    ours = run(tmp_path / "ends", flags, AT_THE_ENDS, num_ranks=8)
    assert_only_the_ends_load(ours)
    assert {size for steps in ours.ranks for step in steps for size in step["cp_sizes"]} == {1, 2}
    assert [step["grad_norm"] for step in ours.steps] == [step["grad_norm"] for step in everywhere.steps]


def test_a_forward_step_that_reads_tokens_on_every_stage_is_an_error(tmp_path: Path) -> None:
    environment = {"READS": "tokens"}
    with pytest.raises(RunFailed, match=r"asks for 'tokens' on a pipeline stage .* Set --balance-load-every-stage"):
        run(tmp_path / "ends", PP3, BALANCED, AT_THE_ENDS, num_ranks=3, environment=environment)
    assert run(tmp_path / "every", PP3, BALANCED, num_ranks=3, environment=environment).steps


@pytest.mark.parametrize("cp_size", [1, 2])
def test_sequences_start_where_those_of_the_pack_do(cp_size: int) -> None:
    topology = Topology(1, cp_size=cp_size, tp_size=2, pp_size=3, sequence_parallel=True)
    multiple = topology.token_multiple
    slots = [[5, 0, 9], [200], []]
    samples = [[sample(length) for length in slot] for slot in slots]
    sizes = [64, 256 + 3 * multiple, 300 // multiple * multiple]
    schema = SampleSchema.of(samples[0][0])
    step = BalancedStep(3, sizes, sequence_lengths=[[n for n in slot if n] for slot in slots])
    for ours, slot, num_tokens in zip(stage_microbatches(step, topology=topology), samples, sizes, strict=True):
        how = {"token_multiple": multiple, "cp_size": cp_size, "num_tokens": num_tokens}
        pack = pack_microbatch(slot, **how) if slot else dummy_microbatch(schema, **how)
        assert set(ours) == {name for name in pack if "seqlen" in name}
        for name, starts in ours.items():
            assert starts.dtype == pack[name].dtype
            assert torch.equal(starts, pack[name])
        assert "tokens" not in ours
        with pytest.raises(BalanceError, match="asks for 'tokens'"):
            ours["tokens"]


def sample(length: int) -> Sample:
    return Sample({"tokens": torch.ones(length, dtype=torch.int64), "loss_mask": torch.ones(length)})


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, True),
        ({"sft": True}, False),
        ({"dataloader_inter_document_masking": True}, False),
        ({"sft": True, "balance_load_every_stage": True}, True),
        ({"balance_load_every_stage": False}, False),
        ({"sft": True, "balance_calibrate_online": True}, True),
        ({"sft": True, "mtp_num_layers": 1}, False),  # on the last stage
        ({"balance_load_every_stage": False, "mtp_num_layers": 1, "pipeline_model_parallel_layout": "E|t|m|L"}, True),
    ],
)
def test_the_safe_choice(given: dict[str, Any], expected: bool) -> None:
    flags = {
        "sft": False,
        "balance_load_every_stage": None,
        "balance_calibrate_online": False,
        "mtp_num_layers": None,
        "pipeline_model_parallel_layout": None,
    }
    assert loads_on_every_stage(Namespace(**flags | given)) is expected
