"""Micro-batches have the sizes that FP8 and FP4 layers take, whatever is in them, and training does not notice."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from forked_runs import train
from hypothesis import assume, given
from hypothesis import strategies as st
from rounding import assert_equal

from megatron_balance import BalanceError, CostModel, Topology
from megatron_balance.mcore.setup.arguments import BalanceConfig
from megatron_balance.mcore.setup.token_alignment import RECIPE_TOKENS, token_alignment
from megatron_balance.mcore.step.balanced_step import BalancedStep
from megatron_balance.mcore.step.planner import StepPlanner
from megatron_balance.mcore.step.pull_ahead import Fetched
from megatron_balance.memory.shape_buckets import bucket_tokens
from megatron_balance.samples.packing import FILLER_TOKENS
from megatron_balance.samples.unpacking import split_packed

PAD_ROUTING = {"moe_router_padding_for_quantization": True}
FUSED = {"use_transformer_engine_op_fuser": True}


def settings_of(recipe: str, **more: bool) -> dict[str, Any]:
    """Megatron's settings of a run with this recipe."""
    if recipe == "nvfp4":
        return {"fp8": None, "fp8_recipe": "delayed", "fp4": "e2m1", "fp4_recipe": recipe, **more}
    return {"fp8": "hybrid", "fp8_recipe": recipe, "fp4": None, "fp4_recipe": "nvfp4", **more}


def alignment_of(recipe: str, **more: bool) -> int:
    return token_alignment(SimpleNamespace(**settings_of(recipe, **more)))


class TestRecipes:
    def test_there_is_none_without_fp8_and_fp4(self) -> None:
        settings = {"fp8": None, "fp8_recipe": "mxfp8", "fp4": None, "fp4_recipe": "nvfp4", **PAD_ROUTING, **FUSED}
        assert token_alignment(SimpleNamespace(**settings)) == 1
        assert token_alignment(SimpleNamespace()) == 1  # a release without such options

    @pytest.mark.parametrize(("recipe", "tokens"), RECIPE_TOKENS.items())
    def test_each_recipe(self, recipe: str, tokens: int) -> None:
        assert alignment_of(recipe) == alignment_of(recipe, **FUSED) == alignment_of(recipe, **PAD_ROUTING) == tokens
        assert alignment_of(recipe, **FUSED, **PAD_ROUTING) == 256

    def test_every_recipe_of_this_megatron_is_known_and_aligned_as_megatron_aligns_experts(self) -> None:
        from megatron.core.enums import Fp4Recipe, Fp8Recipe
        from megatron.core.fp4_utils import get_fp4_align_size
        from megatron.core.fp8_utils import get_fp8_align_size

        known = {recipe.value for recipes in (Fp8Recipe, Fp4Recipe) for recipe in recipes} - {"custom"}
        assert known == set(RECIPE_TOKENS)
        for recipe in Fp8Recipe:
            if recipe.value in known:
                assert token_alignment(SimpleNamespace(fp8="e4m3", fp8_recipe=recipe)) % get_fp8_align_size(recipe) == 0
        assert alignment_of("nvfp4") % get_fp4_align_size(Fp4Recipe.nvfp4) == 0

    @pytest.mark.parametrize("flags", ["--fp8-format hybrid --fp8-recipe", "--fp4-format e2m1 --fp4-recipe"])
    def test_a_recipe_of_ones_own_is_refused(self, flags: str) -> None:
        from megatron.training.arguments import add_megatron_arguments

        parser = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
        args = parser.parse_args([*flags.split(), "custom"])
        with pytest.raises(BalanceError, match=rf"^{flags.split()[-1]} is custom, .* use one of delayed, "):
            token_alignment(args)

    @given(
        st.sampled_from(list(RECIPE_TOKENS)), st.booleans(), st.integers(1, 6), st.integers(0, 2**32), st.floats(0, 1)
    )
    def test_routing_that_megatron_pads_has_tokens_enough(
        self, recipe: str, fused: bool, num_shares: int, seed: int, part: float
    ) -> None:
        """Megatron pads an expert's tokens with others of the rank: of a smaller micro-batch there are too few."""
        from megatron.core.transformer.moe.moe_utils import get_align_size_for_quantization, pad_routing_map

        settings = settings_of(recipe, **PAD_ROUTING, use_transformer_engine_op_fuser=fused)
        multiple = get_align_size_for_quantization(SimpleNamespace(**settings))  # type: ignore[arg-type]
        num_tokens = num_shares * token_alignment(SimpleNamespace(**settings))
        routed = torch.rand(num_tokens, 4, generator=torch.Generator().manual_seed(seed)) <= part
        assert (pad_routing_map(routed, multiple).sum(dim=0) % multiple == 0).all()
        assert (pad_routing_map(torch.ones(1, 4, dtype=torch.bool), multiple).sum(dim=0) % multiple != 0).any()


@pytest.fixture(scope="module")
def group() -> Iterator[Any]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def row(lengths: Sequence[int], *, first_token: int) -> dict[str, torch.Tensor]:
    total = sum(lengths)
    tokens = torch.arange(first_token, first_token + total).unsqueeze(0)
    cu_seqlens = torch.tensor([[0, *torch.tensor(lengths).cumsum(0).tolist()]], dtype=torch.int32)
    return {"tokens": tokens, "labels": tokens + 1, "loss_mask": torch.ones(1, total), "cu_seqlens": cu_seqlens}


def step_of(
    lengths: Sequence[int],
    *,
    group: Any,
    topology: Topology,
    cap: int | None,
    shape_bucket: int = 1,
    pin_memory: bool = False,
) -> BalancedStep:
    config = BalanceConfig(
        use_dynamic_batch_size=cap is not None, max_tokens_per_gpu=cap, balance_data=True, shape_bucket=shape_bucket
    )
    planner = StepPlanner(
        config,
        topology=topology,
        limits=config.limits(micro_batch_size=2, topology=topology),
        cost_model=CostModel(linear=10, quadratic=1),
        dp_group=group,
        pin_memory=pin_memory,
    )
    items = [row([length], first_token=1 + 10_000 * index) for index, length in enumerate(lengths)]
    return planner.make(Fetched(items), num_items=len(items), pool=None)


class TestSteps:
    @given(
        lengths=st.lists(st.integers(1, 700), min_size=1, max_size=12),
        recipe=st.sampled_from([None, *RECIPE_TOKENS]),
        cp_size=st.sampled_from([1, 2, 4]),
        tp_size=st.sampled_from([1, 2, 8]),
        sequence_parallel=st.booleans(),
        microbatch_multiple=st.sampled_from([1, 4]),
        cap=st.sampled_from([None, 300, 1024, 3000]),
        shape_bucket=st.sampled_from([1, 48, 256]),
    )
    def test_every_micro_batch_is_aligned_and_holds_its_samples_unchanged(
        self,
        group: Any,
        lengths: list[int],
        recipe: str | None,
        cp_size: int,
        tp_size: int,
        sequence_parallel: bool,
        microbatch_multiple: int,
        cap: int | None,
        shape_bucket: int,
    ) -> None:
        alignment = 1 if recipe is None else alignment_of(recipe)
        topology = Topology(
            1,
            cp_size=cp_size,
            tp_size=tp_size,
            microbatch_multiple=microbatch_multiple,
            sequence_parallel=sequence_parallel,
            token_alignment=alignment,
        )
        try:
            step = step_of(lengths, group=group, topology=topology, cap=cap, shape_bucket=shape_bucket)
        except BalanceError:  # no aligned micro-batch is that small, as the test below wants
            assume(False)
            return
        assert step.schedule is not None
        assert step.microbatches is not None
        [slots], trained = step.schedule.ranks, []
        for slot, tokens, pack in zip(slots, step.microbatch_tokens, step.microbatches, strict=True):
            assert pack["tokens"].shape == (1, tokens)
            of_a_rank = tokens // cp_size // (tp_size if sequence_parallel else 1)
            assert of_a_rank * cp_size * (tp_size if sequence_parallel else 1) == tokens > 0
            assert of_a_rank % alignment == 0
            in_cap = bool(slot) and slot[0] not in step.schedule.oversized
            if in_cap:
                assert tokens % bucket_tokens(topology, shape_bucket=shape_bucket) == 0
                assert cap is None or tokens <= cap * cp_size
            else:
                held = int(topology.padded_seq_len(step.schedule.lengths[list(slot)]).sum())
                assert tokens - held < topology.pack_multiple or not slot
            widths = pack.get("cu_seqlens_padded", pack["cu_seqlens"])[0].diff()
            assert (widths > 0).all()
            assert (widths % topology.token_multiple == 0).all()
            assert int(widths.sum()) == tokens
            num_real = len(slot)
            assert (widths[num_real:] <= max(FILLER_TOKENS, topology.token_multiple)).all()
            assert not pack["loss_mask"][0, int(widths[:num_real].sum()) :].any()
            assert pack["loss_mask"].sum() == sum(step.schedule.lengths[list(slot)])
            trained += [sample.per_token for sample in split_packed(pack) if sample.per_token["loss_mask"].any()]
        assert step.step_tokens == sum(step.microbatch_tokens)
        expected = [row([length], first_token=1 + 10_000 * index) for index, length in enumerate(lengths)]
        trained.sort(key=lambda sample: int(sample["tokens"][0]))
        for sample, item in zip(trained, expected, strict=True):
            for name in ("tokens", "labels", "loss_mask"):
                assert torch.equal(sample[name], item[name][0])

    def test_without_room_for_one_aligned_share_the_cap_is_refused(self, group: Any) -> None:
        topology = Topology(1, tp_size=8, sequence_parallel=True, token_alignment=alignment_of("blockwise"))
        with pytest.raises(BalanceError, match=r"multiples of 1024 tokens .* --max-tokens-per-gpu 1000 holds none"):
            step_of([5], group=group, topology=topology, cap=1000)

    def test_every_tensor_that_goes_to_a_gpu_is_pinned_once(self, group: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        pinned: list[torch.Tensor] = []

        def pin(tensor: torch.Tensor) -> torch.Tensor:
            pinned.append(tensor.clone())
            return pinned[-1]

        monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
        topology = Topology(1, cp_size=2, microbatch_multiple=4, token_alignment=32)
        options = {"group": group, "topology": topology, "cap": 256}
        ours = step_of([300, 40, 7], **options, pin_memory=True)  # one over the cap, and a dummy at the least
        tensors = [tensor for pack in ours.microbatches or () for tensor in pack.values()]
        assert len(ours.microbatches or ()) == 4
        assert sorted(map(id, tensors)) == sorted(map(id, pinned))
        pinned.clear()
        step_of([300, 40, 7], **options)
        assert not pinned


FLAGS = (
    "--hidden-size 32 --num-attention-heads 4 --num-query-groups 2 --ffn-hidden-size 64 --num-layers 2 "
    "--seq-length 1024 --max-position-embeddings 1024 --global-batch-size 8 --train-iters 4"
)
BY_FLOPS = "--use-dynamic-batch-size --max-tokens-per-gpu 512 --balance-data --balance-by-flops"
EXPERTS = "--num-experts 4 --moe-token-dispatcher-type alltoall --moe-router-load-balancing-type none"


class TestTraining:
    """A CPU has no FP8 and FP4 kernels: micro-batches have the sizes, and the model computes in fp32 or bf16."""

    @pytest.mark.parametrize(
        ("parallel", "num_ranks", "recipe", "multiple"),
        [
            pytest.param("", 2, "blockwise", 128, id="DP2"),
            pytest.param("--context-parallel-size 2", 4, "blockwise", 256, id="CP2", marks=pytest.mark.slow),
            pytest.param(
                "--tensor-model-parallel-size 2 --sequence-parallel",
                4,
                "nvfp4",
                256,
                id="TP2-SP",
                marks=pytest.mark.slow,
            ),
            pytest.param("--pipeline-model-parallel-size 2", 4, "mxfp8", 32, id="PP2", marks=pytest.mark.slow),
            pytest.param(f"--expert-model-parallel-size 2 {EXPERTS}", 2, "delayed", 16, id="EP2"),
        ],
    )
    @pytest.mark.parametrize("precision", [pytest.param("fp32", marks=pytest.mark.slow), "bf16"])
    def test_alignment_changes_no_loss_and_no_gradient_norm(
        self, tmp_path: Path, parallel: str, num_ranks: int, recipe: str, multiple: int, precision: str
    ) -> None:
        flags = f"{FLAGS} {parallel} {'--bf16' if precision == 'bf16' else ''}"
        stock = train(tmp_path / "stock", flags.split(), num_ranks=num_ranks)
        ours = train(
            tmp_path / "ours",
            f"{flags} {BY_FLOPS}".split(),
            num_ranks=num_ranks,
            module="aligned_steps",
            environment={"ALIGNED_FOR": json.dumps(settings_of(recipe))},
        )
        assert_equal(ours, reference=stock, precision=precision)
        planned = [step for steps in ours.ranks for step in steps if "lengths" in step]
        sizes = {tokens for step in planned for tokens in step["microbatch_tokens"]}
        assert {tokens % multiple for tokens in sizes} == {0}
        assert any(length > 512 for step in planned for length in step["lengths"]), "no sample is over-long"
