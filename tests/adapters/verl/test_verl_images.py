"""Rows with images: verl's ranks and micro-batches are balanced by the encoder's work and the language model's."""

import asyncio
from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace

import pytest

pytest.importorskip("verl.protocol")

import numpy as np
import ray
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import transfer_queue
from tensordict import TensorDict
from test_verl_trainer import DP_SIZE, slices_of, trainer_of
from transformers import Qwen2_5_VLConfig
from verl.single_controller.base import decorator
from verl.trainer.ppo.ray_trainer import RayPPOTrainer
from verl.trainer.ppo.v1.trainer_base import PPOTrainer
from verl.utils import seqlen_balancing
from verl.utils.tensordict_utils import list_of_dict_to_tensordict
from verl_batches import multi_modal_inputs, nested_batch, padded_batch

from benchmarks.adapters.verl_images import measure
from megatron_balance import BalanceError, CostModel, ModelShape
from megatron_balance.adapters.verl import balance_data_proto, install
from megatron_balance.adapters.verl.image_tags import tagged_images
from megatron_balance.adapters.verl.settings import Settings
from megatron_balance.adapters.verl.transport import BalancedDispatch
from megatron_balance.adapters.verl.workload import choose_encoder, choose_workload, workloads
from megatron_balance.planner.images import Images

MODEL = "Qwen2.5-VL-7B"
COST = CostModel.from_shape(ModelShape.preset(MODEL), microbatch_tokens=128)
NUM_ROWS = 64
LENGTHS = np.random.default_rng(11).integers(2000, 2400, NUM_ROWS)
GRIDS = [[[1, 120, 120]] if row % 8 < 3 else [] for row in range(NUM_ROWS)]
"""Rows of nearly equal length; three of eight have a picture that costs about as much as the row's tokens."""


def costs_of(lengths, grids):
    images = [sum(frames * COST.image_cost(rows * columns) for frames, rows, columns in grid) for grid in grids]
    return np.array([COST(int(length)) + of_row for length, of_row in zip(lengths, images, strict=True)], dtype=object)


COSTS = costs_of(LENGTHS, GRIDS)


@pytest.fixture
def installed():
    adapter = install(MODEL)
    yield
    adapter.undo()


def images_of(patches):
    return Images.of(patches, num_samples=len(patches))


def imbalance(parts):
    """Busiest over mean of parts of rows."""
    loads = [int(COSTS[part].sum()) for part in parts]
    return max(loads) * len(loads) / sum(loads)


def test_work_is_that_of_both_parts():
    cost_model = choose_workload(MODEL)
    found = workloads(np.array([100, 100, 7]), cost_model=cost_model, images=images_of([[], [64, 64, 256], [1024]]))
    exact = costs_of([100, 100, 7], [[], [[2, 8, 8], [1, 16, 16]], [[1, 32, 32]]]) / COST.quadratic
    assert found.tolist() == pytest.approx(exact.astype(float).tolist(), abs=1)


def test_the_encoder_is_read_from_verls_hf_config():
    config = Qwen2_5_VLConfig()
    cost_model = choose_workload(config)
    vision, read = config.vision_config, choose_encoder(config, cost_model=cost_model)
    assert (read.hidden_size, read.num_layers) == (vision.hidden_size, vision.depth)
    assert cost_model.image_quadratic > 0
    assert choose_encoder(config, cost_model=choose_workload(config, cost="tokens")) is None
    assert choose_encoder({"mlp_workload_factor": 7}, cost_model=choose_workload()) is None


@pytest.mark.usefixtures("installed")
def test_ranks_share_both_parts():
    """Of the trainers whose batch is a DataProto; by tokens alone pictures gather on some ranks."""
    trainer = trainer_of(ppo_mini_batch_size=8, rollout_n=4)
    for grids, least, most in ((GRIDS, 1, 1.02), (None, 1.1, 4)):
        batch = padded_batch(LENGTHS, grids=grids)
        RayPPOTrainer._balance_batch(trainer, batch, {})
        of_slices = [imbalance(parts) for parts in slices_of(batch.batch["row"].numpy(), minibatch_rows=32)]
        assert least <= max(of_slices) < most


@pytest.mark.usefixtures("installed")
def test_rows_of_a_prompt_share_both_parts_and_stay_neighbours():
    uids = np.arange(NUM_ROWS) // 2
    batch = padded_batch(LENGTHS, grids=[GRIDS[4 * uid % NUM_ROWS] for uid in uids], uids=uids)
    RayPPOTrainer._balance_batch(trainer_of(ppo_mini_batch_size=64, use_prefix_grouper=True), batch, {})
    patches = [len(row) for row in batch.non_tensor_batch["multi_modal_inputs"]]
    of_ranks = np.array(patches).reshape(DP_SIZE, -1).sum(axis=1)
    assert of_ranks.max() - of_ranks.min() <= 4
    assert (batch.non_tensor_batch["uid"][::2] == batch.non_tensor_batch["uid"][1::2]).all()


@pytest.mark.usefixtures("installed")
def test_keys_in_the_transfer_queue_are_tagged_and_share_both_parts():
    """Of the v1 trainers, which see tags alone. Rows are put as the agent loop's worker puts them."""
    ray.init(num_cpus=4, include_dashboard=False, logging_level="warning")
    try:
        transfer_queue.init()
        inputs = multi_modal_inputs(GRIDS)
        fields = [{"row": torch.tensor([row]), "multi_modal_inputs": inputs[row]} for row in range(NUM_ROWS)]
        put = transfer_queue.async_kv_batch_put(
            keys=[str(row) for row in range(NUM_ROWS)],
            fields=list_of_dict_to_tensordict(fields),
            tags=[{"seq_len": int(length)} for length in LENGTHS],
            partition_id="train",
        )
        asyncio.run(put)
        tags = transfer_queue.kv_list(partition_id="train")["train"]
    finally:
        transfer_queue.close()
        ray.shutdown()
    batch = transfer_queue.KVBatchMeta(keys=list(tags), tags=list(tags.values()))
    ordered = PPOTrainer._balance_batch(trainer_of(ppo_mini_batch_size=NUM_ROWS), batch, {})
    assert imbalance(np.array([int(key) for key in ordered.keys]).reshape(DP_SIZE, -1)) < 1.02


def test_padding_of_the_transfer_queue_has_no_images():
    settings = Settings(COST, keep_minibatch=True, dispatch=False, encoder=ModelShape.preset(MODEL).vision)
    tags = [{"image_patches": [64, 4096]}, {"image_patches": [64, 4096], "is_padding": True}, {}]
    assert tagged_images(tags, settings=settings).sums.tolist() == [[64, 4096], [0, 0], [0, 0]]
    assert tagged_images([{}, {}], settings=settings) is None
    assert tagged_images(tags, settings=replace(settings, encoder=None)) is None


def test_parts_of_a_data_proto_and_calls_share_both_parts():
    data = padded_batch(LENGTHS[:62], grids=GRIDS[:62])
    parts = balance_data_proto(data, 4, model_config=MODEL).parts
    assert imbalance([part.batch["row"].numpy() for part in parts]) < 1.02
    assert sum(map(len, parts)) == 64

    adapter = install(MODEL, dispatch=True)
    try:
        group = SimpleNamespace()
        split = BalancedDispatch(lambda _, *args: decorator._split_args_kwargs_data_proto(4, *args), "train_batch")
        for batch in (padded_batch(LENGTHS, grids=GRIDS), nested_batch(LENGTHS, grids=GRIDS)):
            ((parts,), _) = split(group, batch)
            rows = [part["row"] if isinstance(part, TensorDict) else part.batch["row"] for part in parts]
            assert imbalance([of_part.numpy() for of_part in rows]) < 1.02
    finally:
        adapter.undo()


def _rank_main(rank, init_file, results):
    """Calls on two ranks: pictures on both, on rank 0 alone, on neither, and a grid of rank 1 that cannot be read."""
    dist.init_process_group(
        "gloo", init_method=f"file://{init_file}", world_size=2, rank=rank, timeout=timedelta(seconds=60)
    )
    install(MODEL)
    lengths, grids = LENGTHS[rank::2], GRIDS[rank::2]
    unread = nested_batch(lengths, grids=grids)
    if rank:
        next(row for row in unread["multi_modal_inputs"].tolist() if row)["image_grid_thw"] = torch.tensor([7])
    batches = [nested_batch(lengths, grids=of_call) for of_call in (grids, None if rank else grids, None)]
    found = []
    for batch in (*batches, unread):
        try:
            _, indices = seqlen_balancing.rearrange_micro_batches(batch, max_token_len=20000, dp_group=dist.group.WORLD)
            found.append(indices)
        except BalanceError as error:
            found.append(str(error))
    torch.save(found, f"{results}.{rank}")
    dist.destroy_process_group()


def test_micro_batches_share_both_parts_whichever_rank_has_images(tmp_path):
    mp.spawn(_rank_main, args=(str(tmp_path / "init"), str(tmp_path / "results")), nprocs=2)
    calls = list(zip(*(torch.load(tmp_path / f"results.{rank}") for rank in range(2)), strict=True))
    rows_of = [np.arange(rank, NUM_ROWS, 2) for rank in range(2)]
    for on_ranks, planned in zip(((0, 1), (0,), ()), calls[:3], strict=True):
        assert len(planned[0]) == len(planned[1]) == 4
        for rank, indices in enumerate(planned):
            assert sorted(row for rows in indices for row in rows) == list(range(NUM_ROWS // 2))
            even = imbalance([rows_of[rank][rows] for rows in indices]) < 1.03
            assert even == (rank in on_ranks)
    assert calls[3][0] == calls[3][1]
    assert "rank 1 cannot go on" in calls[3][0]
    assert "image_grid_thw" in calls[3][0]


def test_figures_of_the_benchmark():
    """`python -m benchmarks.adapters.verl_images`, fewer batches."""
    by_tokens, both = (measure("llava", way=way, seeds=3) for way in ("adapter, tokens only", "adapter"))
    assert both.ranks < 1.001 < 1.01 < by_tokens.ranks
    assert both.micro_batches < by_tokens.micro_batches
    assert both.num_micro_batches == by_tokens.num_micro_batches
