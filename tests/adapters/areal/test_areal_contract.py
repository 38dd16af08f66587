"""The hooks on the real AReaL: what is replaced, what its own code then does, and that it can be undone."""

from __future__ import annotations

import inspect
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from areal_world import HAS_AREAL

from megatron_balance.adapters import areal
from megatron_balance.adapters.areal import hooks
from megatron_balance.adapters.areal.single_rank import IdleDataLoader
from megatron_balance.errors import BalanceError

if not HAS_AREAL:
    pytest.skip("AReaL is not installed: scripts/adapter_env.sh areal", allow_module_level=True)
areal_data = import_module("areal.utils.data")
cli_args = import_module("areal.api.cli_args")
rl_trainer = import_module("areal.trainer.rl_trainer")
rtensor = import_module("areal.infra.rpc.rtensor")
seqpack = import_module("areal.utils.seqpack")
train_controller = import_module("areal.infra.controller.train_controller")

pytestmark = pytest.mark.usefixtures("undone")
ROOT = Path(__file__).parents[3]


def rows_of(lengths: list[int]) -> list[dict[str, Any]]:
    return [
        {"attention_mask": torch.ones(1, length, dtype=torch.bool), "index": torch.tensor([index])}
        for index, length in enumerate(lengths)
    ]


def bound_functions() -> dict[str, object]:
    """The function at every place that a hook names."""
    found = {}
    for hook in hooks._hooks(hooks.ArealOptions(single_rank_load=True)):
        name = hook.target.split(":")[1].split(".")[-1]
        for place in hook.bound_in:
            module, _, class_name = place.partition(":")
            owner = import_module(module)
            found[f"{place}.{name}"] = vars(getattr(owner, class_name) if class_name else owner)[name]
    return found


def test_importing_patches_nothing_and_undo_restores_the_very_functions() -> None:
    before = bound_functions()
    assert len(before) == 11
    installed = areal.install(single_rank_load=True)
    assert areal.is_installed()
    during = bound_functions()
    assert all(during[place] is not before[place] for place in before)
    installed.undo()
    assert not areal.is_installed()
    after = bound_functions()
    assert all(after[place] is before[place] for place in before)


def test_replacements_take_what_is_called_with() -> None:
    """Same names, same order, same defaults as the functions whose place they take."""
    before = {place: inspect.signature(function) for place, function in bound_functions().items()}
    areal.install(single_rank_load=True)
    for place, function in bound_functions().items():
        ours, theirs = inspect.signature(function).parameters, before[place].parameters
        assert [(p.name, p.default) for p in ours.values()] == [(p.name, p.default) for p in theirs.values()], place


def test_without_single_rank_load_the_trainer_is_left_alone() -> None:
    before = bound_functions()
    areal.install()
    after = bound_functions()
    untouched = [place for place in before if after[place] is before[place]]
    assert len(untouched) == 4
    assert all("PPOTrainer" in place or place.endswith(("rollout_batch", "prepare_batch")) for place in untouched)


def test_installing_twice_installs_once() -> None:
    installed = areal.install(cost="tokens")
    assert areal.install() is installed
    with pytest.raises(BalanceError, match="hooked already"):
        areal.install(model="Qwen3-8B")


def test_another_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hooks, "installed_version", lambda name: "1.1.0")
    before = bound_functions()
    with pytest.raises(BalanceError, match=r"areal is 1\.1\.0; megatron_balance is tested on 1\.0\.4"):
        areal.install()
    assert bound_functions() == before
    assert not areal.is_installed()


def test_a_target_that_takes_other_parameters_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def dispatch(item_list: list, world_size: int) -> None: ...

    monkeypatch.setattr(train_controller, "_dispatch_tensors", dispatch)
    before = bound_functions()
    with pytest.raises(BalanceError, match=r"areal 1\.0\.4: it no longer takes dp_size, group_size"):
        areal.install()
    assert bound_functions() == before
    assert not areal.is_installed()


def test_wrong_costs_are_refused_before_anything_is_hooked() -> None:
    with pytest.raises(BalanceError, match="the cost is flops"):
        areal.install(cost="flops")
    assert not areal.is_installed()


def controller(dp_size: int) -> Any:
    made = object.__new__(train_controller.TrainController)
    made.train_alloc = SimpleNamespace(parallel=SimpleNamespace(dp_size=dp_size))
    return made


def test_fifteen_items_are_dispatched_to_four_workers_and_merged_in_order() -> None:
    """AReaL raises: the number must be divisible."""
    items = rows_of([905, 40, 40, 300, 20, 10, 800, 70, 5, 500, 450, 30, 60, 200, 95])
    with pytest.raises(ValueError, match="divisible"):
        controller(4)._partition_inputs(1, items)
    areal.install()
    (split,), kwargs, indices = controller(4)._partition_inputs(1, items, labels=rows_of([1] * 15))
    assert sorted(len(part) for part in split) == [3, 4, 4, 4]
    # Arguments after the first go where the first went.
    assert [[int(row["index"]) for row in part] for part in kwargs["labels"]] == indices
    results = [[int(row["index"]) for row in part] for part in split]
    assert train_controller._merge_tensors(results, indices) == list(range(15))
    tokens = [sum(row["attention_mask"].numel() for row in part) for part in split]
    assert max(tokens) <= 1.05 * sum(tokens) / 4


def test_dispatch_by_flops_evens_out_squares() -> None:
    lengths = [16384, *[1024] * 31]
    flops = hooks.resolve_cost("flops", model="Qwen3-8B")

    def costliest() -> int:
        _, indices = train_controller._dispatch_tensors(rows_of(lengths), 4)
        assert [len(part) for part in indices] == [8] * 4
        return max(sum(flops(lengths[index]) for index in part) for part in indices)

    areal.install(model="Qwen3-8B")
    bound = flops(16384) + 7 * flops(1024)
    assert costliest() == bound


def test_pairs_stay_together() -> None:
    areal.install()
    _, indices = train_controller._dispatch_tensors(rows_of([9, 1, 8, 2, 7, 3, 6, 4]), 2, group_size=2)
    for part in indices:
        assert [index // 2 for index in part[::2]] == [index // 2 for index in part[1::2]]
        assert len(part) == 4


def test_handles_of_tensors_weigh_as_much_as_their_shape() -> None:
    areal.install()
    lengths = [900, 100, 500, 500, 60, 40]
    items = [
        {
            "input_ids": rtensor.RTensor(
                shard=rtensor.TensorShardInfo(shard_id="s", node_addr=""), data=torch.empty(1, n, device="meta")
            )
        }
        for n in lengths
    ]
    _, indices = train_controller._dispatch_tensors(items, 2)
    tokens = sorted(sum(lengths[index] for index in part) for part in indices)
    assert [len(part) for part in indices] == [3, 3]
    assert tokens[1] - tokens[0] <= 80


def test_a_hidden_tensor_keeps_its_last_axis() -> None:
    """AReaL cuts [1, 6, 8] to [1, 6, 3]."""
    batch = {"attention_mask": torch.arange(6)[None] < 3, "hidden": torch.randn(1, 6, 8), "logp": torch.randn(1, 6)}
    assert areal_data.split_and_unpad_tensor(batch, 1)[0]["hidden"].shape == (1, 6, 3)
    areal.install()
    (part,) = areal_data.split_and_unpad_tensor(batch, 1)
    assert torch.equal(part["hidden"], batch["hidden"][:, :3])
    assert torch.equal(part["logp"], batch["logp"][:, :3])
    assert part["attention_mask"].shape == (1, 3)


def test_a_result_is_split_by_the_lengths_that_went_in() -> None:
    areal.install()
    rows = [{"attention_mask": torch.ones(2, length), "x": torch.randn(2, length, 5)} for length in (4, 7, 2)]
    batch, meta = areal_data.concat_batch(rows)
    parts = areal_data.split_batch(batch, meta)
    assert all(torch.equal(part["x"], row["x"]) for part, row in zip(parts, rows, strict=True))
    assert [part.shape for part in areal_data.split_batch(batch["x"], meta)] == [(2, 4, 5), (2, 7, 5), (2, 2, 5)]
    assert areal_data.split_batch(None, meta) is None


@pytest.mark.parametrize("spec", [{"n_mbs": 4}, {"n_mbs": 1, "max_tokens_per_mb": 600}, {"n_mbs": 2, "granularity": 2}])
def test_micro_batches_of_one_process(spec: dict[str, int]) -> None:
    """AReaL's split through ours, and its own way back to the rows' order."""
    areal.install()
    lengths = [9, 400, 33, 250, 7, 500, 81, 64, 300, 120, 5, 77, 205, 18, 90, 150]
    rows = [{"input_ids": torch.arange(length) + 1} for length in lengths]
    batch = areal_data.pad_sequences_to_tensors(rows)
    split = areal_data.split_padded_tensor_dict_into_mb_list(batch, cli_args.MicroBatchSpec(**spec))
    joined = torch.cat([mb["input_ids"] for mb in split.mbs])
    assert torch.equal(joined[split.backward_indices], batch["input_ids"])
    assert len(split.mbs) >= spec["n_mbs"]
    assert max(split.group_lens) <= spec.get("max_tokens_per_mb", sum(lengths))
    assert sum(split.group_lens) == sum(lengths)


def test_a_divisor_that_rows_cannot_fill_is_refused() -> None:
    """AReaL's own gives 5 groups where a multiple of 4 was asked for."""
    assert len(seqpack.kk_allocate([5] * 5, 5, 1, 4)) == 5
    areal.install()
    spec = cli_args.MicroBatchSpec(n_mbs=1, max_tokens_per_mb=5, n_mbs_divisor=4, packing_algorithm="kk")
    with pytest.raises(BalanceError, match="5 rows for 8 micro-batches"):
        areal_data.allocate_balanced_mbs_synced(spec, [5] * 5)


def trainer(*, dp_rank: int, head: bool = True, dp_size: int = 2) -> Any:
    made = object.__new__(rl_trainer.PPOTrainer)
    made.actor = SimpleNamespace(
        data_parallel_rank=dp_rank, data_parallel_world_size=dp_size, is_data_parallel_head=lambda: head
    )
    return made


@pytest.mark.parametrize(("dp_rank", "head"), [(0, False), (1, True), (1, False)])
def test_ranks_that_do_not_roll_out_have_an_idle_loader(dp_rank: int, head: bool) -> None:
    """R56: as many steps as the rank that loads, and no batches."""
    areal.install(single_rank_load=True)
    config = cli_args.TrainDatasetConfig(path="", type="rl", batch_size=8)
    loader = trainer(dp_rank=dp_rank, head=head)._create_dataloader(list(range(100)), config, dp_rank, 2)
    whole = trainer(dp_rank=0)._create_dataloader(list(range(100)), config, 0, 2)
    assert isinstance(loader, IdleDataLoader)
    assert len(loader) == len(whole) == 12
    assert [len(batch) for batch in whole] == [8] * 12


def test_validation_data_and_a_single_rank_are_left_alone() -> None:
    areal.install(single_rank_load=True)
    valid = cli_args.ValidDatasetConfig(path="", type="rl", batch_size=8, drop_last=False)
    loaders = [trainer(dp_rank=rank)._create_dataloader(list(range(11)), valid, rank, 2) for rank in (0, 1)]
    assert sorted(sample for loader in loaders for batch in loader for sample in batch) == list(range(11))
    train = cli_args.TrainDatasetConfig(path="", type="rl", batch_size=4)
    alone = trainer(dp_rank=0, dp_size=1)._create_dataloader(list(range(8)), train, 0, 1)
    assert [len(batch) for batch in alone] == [4, 4]


@pytest.mark.parametrize(
    ("dp_rank", "is_eval", "expected"), [(0, False, (64, 256)), (1, False, (16, 64)), (0, True, (16, 64))]
)
def test_capacity_scales_with_the_ranks(
    monkeypatch: pytest.MonkeyPatch, dp_rank: int, is_eval: bool, expected: tuple[int, int]
) -> None:
    """R57: the rank that rolls out for four has four times the batch size and concurrency."""
    seen = []

    def init_rollout(self: Any, rollout_config: Any, is_eval: bool = False, lora_path: str | None = None) -> None:
        seen.append((rollout_config.consumer_batch_size, rollout_config.max_concurrent_rollouts))

    monkeypatch.setattr(rl_trainer.PPOTrainer, "_init_rollout", init_rollout)
    installed = areal.install(single_rank_load=True)
    config = cli_args.InferenceEngineConfig(consumer_batch_size=16, max_concurrent_rollouts=64)
    trainer(dp_rank=dp_rank, dp_size=4)._init_rollout(config, is_eval=is_eval, lora_path=None)
    installed.undo()
    assert seen == [expected]
    assert (config.consumer_batch_size, config.max_concurrent_rollouts) == (16, 64)


def test_concurrency_that_follows_the_batch_size_goes_on_doing_so() -> None:
    scaled = areal.scaled_for_one_rank(cli_args.InferenceEngineConfig(consumer_batch_size=16), dp_size=4)
    assert (scaled.consumer_batch_size, scaled.max_concurrent_rollouts) == (64, None)


def test_the_launcher_hooks_and_hands_on_arguments(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import sys\nfrom megatron_balance.adapters.areal import hooks\n"
        "print(hooks.installation.settings.cost_model.quadratic > 0, sys.argv[1:], __name__)\n"
    )
    command = [sys.executable, "-m", "megatron_balance.adapters.areal", "--model", "Qwen3-8B", str(script)]
    done = subprocess.run([*command, "--config", "a.yaml"], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.splitlines()[-1] == "True ['--config', 'a.yaml'] __main__"
