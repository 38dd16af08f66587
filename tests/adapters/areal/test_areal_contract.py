"""The hooks on the real AReaL: what is replaced, what its own code then does, and that it can be undone."""

import inspect
from functools import partial
from importlib import import_module
from itertools import islice
from types import SimpleNamespace

import pytest
import torch
from areal.api import cli_args
from areal.infra.controller import train_controller
from areal.models.tree_attn import tree
from areal.trainer import rl_trainer
from areal.trainer.ppo.actor import PPOActorControllerV2
from areal.utils import data as areal_data
from areal.utils import functional, seqpack

from megatron_balance import BalanceError
from megatron_balance.adapters import areal

HOOKED = (
    "areal.experimental.training_service.controller.controller",
    "areal.infra.controller.train_controller",
    "areal.infra.dist_rollout",
    "areal.models.tree_attn.tree",
    "areal.trainer.rl_trainer",
    "areal.utils.data",
)


def functions():
    """Every function and method of the modules that are hooked."""
    by_place = {}
    for name in HOOKED:
        for key, value in vars(import_module(name)).items():
            owned = vars(value).items() if inspect.isclass(value) and value.__module__ == name else ()
            by_place |= {f"{name}:{key}.{method}": function for method, function in owned}
            by_place[f"{name}:{key}"] = value
    return {
        place: value for place, value in by_place.items() if inspect.isfunction(value) or isinstance(value, partial)
    }


def test_undo_restores_the_very_functions(install):
    before = functions()
    installed = install(single_rank_load=True)
    assert areal.is_installed()
    during = functions()
    hooked = [place for place in before if during[place] is not before[place]]
    assert len(hooked) >= 9
    for place in hooked:
        # Replacements take what is called with: same names, same order, same defaults.
        replaced, stock = (inspect.signature(of[place]).parameters.values() for of in (during, before))
        assert [(p.name, p.default) for p in replaced] == [(p.name, p.default) for p in stock], place
    installed.undo()
    assert not areal.is_installed()
    assert functions() == before
    install()
    # Without single_rank_load the trainer and its rollouts are left alone.
    unhooked = [place for place in hooked if functions()[place] is before[place]]
    assert unhooked
    assert all("PPOTrainer" in place or place.endswith(("rollout_batch", "prepare_batch")) for place in unhooked)


def rows_of(lengths):
    return [{"attention_mask": torch.ones(1, n), "index": torch.tensor([index])} for index, n in enumerate(lengths)]


def controller(dp_size):
    instance = object.__new__(train_controller.TrainController)
    instance.train_alloc = SimpleNamespace(parallel=SimpleNamespace(dp_size=dp_size))
    return instance


def test_fifteen_items_are_dispatched_to_four_workers_and_merged_in_order(install):
    """AReaL raises: the number must be divisible."""
    items = rows_of([905, 40, 40, 300, 20, 10, 800, 70, 5, 500, 450, 30, 60, 200, 95])
    with pytest.raises(ValueError, match="divisible"):
        controller(4)._partition_inputs(1, items)
    install()
    (split,), kwargs, indices = controller(4)._partition_inputs(1, items, labels=rows_of([1] * 15))
    assert sorted(len(part) for part in split) == [3, 4, 4, 4]
    # Arguments after the first go where the first went.
    assert [[int(row["index"]) for row in part] for part in kwargs["labels"]] == indices
    results = [[int(row["index"]) for row in part] for part in split]
    assert train_controller._merge_tensors(results, indices) == list(range(15))
    tokens = [sum(row["attention_mask"].numel() for row in part) for part in split]
    assert max(tokens) <= 1.05 * sum(tokens) / 4


def test_a_divisor_that_rows_cannot_fill_is_refused(install):
    """AReaL's own gives 5 groups where a multiple of 4 was asked for."""
    assert len(seqpack.kk_allocate([5] * 5, 5, 1, 4)) == 5
    install()
    spec = cli_args.MicroBatchSpec(n_mbs=1, max_tokens_per_mb=5, n_mbs_divisor=4, packing_algorithm="kk")
    with pytest.raises(BalanceError, match=r"5 samples .* for 8 micro-batches"):
        areal_data.allocate_balanced_mbs_synced(spec, [5] * 5)


def trainer(*, dp_rank, head=True, dp_size=2):
    instance = object.__new__(rl_trainer.PPOTrainer)
    instance.actor = SimpleNamespace(
        data_parallel_rank=dp_rank, data_parallel_world_size=dp_size, is_data_parallel_head=lambda: head
    )
    return instance


@pytest.mark.parametrize(("dp_rank", "head"), [(0, False), (1, True), (1, False)])
def test_ranks_that_do_not_roll_out_have_an_idle_loader(install, dp_rank, head):
    """R56: as many steps as the rank that loads, and no batches."""
    install(single_rank_load=True)
    config = cli_args.TrainDatasetConfig(path="", type="rl", batch_size=8)
    loader = trainer(dp_rank=dp_rank, head=head)._create_dataloader(list(range(100)), config, dp_rank, 2)
    whole = trainer(dp_rank=0)._create_dataloader(list(range(100)), config, 0, 2)
    assert (len(loader), loader.batch_size) == (len(whole), 8) == (12, 8)
    loader.load_state_dict(loader.state_dict())
    with pytest.raises(BalanceError, match="loads nothing"):
        iter(loader)
    assert [len(batch) for batch in whole] == [8] * 12


def test_validation_data_and_a_single_rank_are_left_alone(install):
    install(single_rank_load=True)
    valid = cli_args.ValidDatasetConfig(path="", type="rl", batch_size=8, drop_last=False)
    loaders = [trainer(dp_rank=rank)._create_dataloader(list(range(11)), valid, rank, 2) for rank in (0, 1)]
    assert sorted(sample for loader in loaders for batch in loader for sample in batch) == list(range(11))
    train = cli_args.TrainDatasetConfig(path="", type="rl", batch_size=4)
    unhooked = trainer(dp_rank=0, dp_size=1)._create_dataloader(list(range(8)), train, 0, 1)
    assert [len(batch) for batch in unhooked] == [4, 4]


@pytest.mark.parametrize(
    ("dp_rank", "is_eval", "expected"), [(0, False, (64, 256)), (1, False, (16, 64)), (0, True, (16, 64))]
)
def test_capacity_scales_with_the_ranks(install, monkeypatch, dp_rank, is_eval, expected):
    """R57: the rank that rolls out for four has four times the batch size and concurrency."""
    shapes = []

    def init_rollout(self, rollout_config, is_eval=False, lora_path=None):
        shapes.append((rollout_config.consumer_batch_size, rollout_config.max_concurrent_rollouts))

    monkeypatch.setattr(rl_trainer.PPOTrainer, "_init_rollout", init_rollout)
    installed = install(single_rank_load=True)
    config = cli_args.InferenceEngineConfig(consumer_batch_size=16, max_concurrent_rollouts=64)
    trainer(dp_rank=dp_rank, dp_size=4)._init_rollout(config, is_eval=is_eval, lora_path=None)
    installed.undo()
    assert shapes == [expected]
    assert (config.consumer_batch_size, config.max_concurrent_rollouts) == (16, 64)


def test_batches_go_on_when_an_epoch_ends(install):
    """R45: AReaL's own `cycle_dataloader` fetches a batch of the hooked loader, started again or not."""
    install(single_rank_load=True)
    config = cli_args.TrainDatasetConfig(path="", type="rl", batch_size=4)
    loader = trainer(dp_rank=0)._create_dataloader(list(range(8)), config, 0, 2)
    assert [len(batch) for batch in islice(areal_data.cycle_dataloader(loader), 5)] == [4] * 5


def test_controllers_whose_processes_would_not_be_hooked_are_refused(install):
    install()
    with pytest.raises(BalanceError, match="_version: v1"):
        PPOActorControllerV2(train_engine="", config=SimpleNamespace(backend="fsdp:d2"), scheduler=None)


def test_the_loss_does_not_depend_on_the_micro_batches(install):
    """AReaL weighs the loss of a micro-batch by its learned tokens over those of all (`compute_total_loss_weight`)."""
    generator = torch.Generator().manual_seed(0)
    lengths = [90, 10, 40, 60, 30, 70]
    columns = [
        {name: torch.randn(n, generator=generator) for name in ("old_logprobs", "advantages")}
        | {"loss_mask": torch.rand(n, generator=generator) > 0.5}
        for n in lengths
    ]

    def gradient(slots):
        logprobs = [torch.zeros(n, requires_grad=True) for n in lengths]
        for slot in slots:
            batch = {name: torch.cat([columns[row][name] for row in slot]) for name in columns[0]}
            current = torch.cat([logprobs[row] for row in slot])
            loss, _ = functional.ppo_actor_loss_fn(current, batch["old_logprobs"], eps_clip=0.2, **batch)
            (loss * batch["loss_mask"].count_nonzero()).backward()
        return torch.cat([row.grad for row in logprobs if row.grad is not None])

    install()
    spec = cli_args.MicroBatchSpec(n_mbs=1, max_tokens_per_mb=120)
    slots = areal_data.allocate_balanced_mbs_synced(spec, lengths)
    assert 1 < len(slots) < len(lengths)
    assert torch.allclose(gradient(slots), gradient([[row] for row in range(len(lengths))]))


def padded(sequences):
    """Sequences of tokens as AReaL's rollouts have them."""
    width = max(map(len, sequences))
    ids = torch.tensor([[*sequence, *[0] * (width - len(sequence))] for sequence in sequences])
    mask = torch.tensor([[1] * len(sequence) + [0] * (width - len(sequence)) for sequence in sequences])
    return {"input_ids": ids, "attention_mask": mask}


def test_trees_are_those_of_our_plan(install):
    """Four prompts of 60 tokens with four responses of 16 each, in turns: two prompts fit in a tree of 256 tokens."""
    prompts = [[1000 * prompt + index for index in range(60)] for prompt in range(4)]
    answers = [[5000 + 100 * answer + index for index in range(16)] for answer in range(4)]
    data = padded([prompt + answer for answer in answers for prompt in prompts])
    spec = cli_args.MicroBatchSpec(max_tokens_per_mb=256)
    stock = tree.build_packed_tree_batch(data, spec)
    assert sum(stock.group_lens) > 4 * 124, "first fit takes three prompts together, whose other responses find no room"
    install()
    ours = tree.build_packed_tree_batch(data, spec)
    assert ours.group_lens == [248, 248]
    rows = sorted(index for trie in ours.mbs for index in trie["trie_node"].all_sequence_ids)
    assert rows == list(range(16))
    for microbatch in ours.mbs:
        trie = microbatch["trie_node"]
        for row in trie.all_sequence_ids:
            places = trie.get_sequence_tree_indices(row)
            held = torch.cat([microbatch["input_ids"].reshape(-1)[start : end + 1] for start, end in places])
            assert held.tolist() == data["input_ids"][row].tolist()
    with pytest.raises(ValueError, match="Sequence length 76 exceeds max_tokens_per_tree 64"):
        tree._greedy_build_tries(data, 64)
