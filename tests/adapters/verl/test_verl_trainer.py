"""R15, R17: the trainers' `_balance_batch`, on the real classes, inside mini-batches."""

from types import SimpleNamespace

import numpy as np
import pytest
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.ray_trainer import RayPPOTrainer
from verl.trainer.ppo.v1.trainer_base import PPOTrainer
from verl_batches import installed, padded_batch

DP_SIZE = 4
LENGTHS = np.clip(np.random.default_rng(7).lognormal(5, 1, 64), 1, 2000).astype(np.int64)


def work(tokens):
    return tokens**2 + 24576 * tokens


def trainer_of(*, ppo_mini_batch_size, rollout_n=1, **attributes):
    """The parts of a trainer that `_balance_batch` reads. Eight workers, two to a data-parallel rank."""
    actor = SimpleNamespace(ppo_mini_batch_size=ppo_mini_batch_size, get=lambda key: ppo_mini_batch_size)
    role = SimpleNamespace(actor=actor, rollout=SimpleNamespace(n=rollout_n))
    mapping = [rank // 2 for rank in range(2 * DP_SIZE)]
    group = SimpleNamespace(_dispatch_info={}, _query_dispatch_info=lambda role: mapping)
    trainer = SimpleNamespace(
        config=SimpleNamespace(
            actor_rollout_ref=role,
            trainer=SimpleNamespace(critic_warmup=0),
        ),
        actor_rollout_wg=group,
        tokenizer=SimpleNamespace(eos_token_id=0),
        use_critic=False,
        global_steps=1,
        **attributes,
    )
    trainer._get_dp_size = lambda worker_group, role: RayPPOTrainer._get_dp_size(trainer, worker_group, role)
    trainer._get_required_batch_multiple = lambda dp_size: PPOTrainer._get_required_batch_multiple(trainer, dp_size)
    return trainer


@pytest.fixture(autouse=True)
def adapter():
    with installed():
        yield


def balance(trainer, *, lengths=LENGTHS, uids=None, **arguments):
    """Rows in their new order, `[num_rows]`, and the metrics."""
    batch, metrics = padded_batch(lengths, uids=uids), {}
    RayPPOTrainer._balance_batch(trainer, batch, metrics, **arguments)
    rows = batch.batch["row"].numpy()
    assert sorted(rows.tolist()) == list(range(len(lengths)))
    return rows, metrics


def balance_keys(trainer):
    """As `balance`, by the v1 trainer, which orders keys."""
    tags = [{"seq_len": int(length)} for length in LENGTHS]
    batch, metrics = KVBatchMeta(keys=[str(row) for row in range(64)], tags=tags), {}
    ordered = PPOTrainer._balance_batch(trainer, batch, metrics)
    rows = np.array([int(key) for key in ordered.keys])
    assert [tag["seq_len"] for tag in ordered.tags] == LENGTHS[rows].tolist()
    return rows, metrics


def slices_of(rows, *, minibatch_rows):
    """`[num_minibatches, dp_size, rows]`, as verl's ranks cut their parts."""
    return rows.reshape(DP_SIZE, -1, minibatch_rows // DP_SIZE).swapaxes(0, 1)


@pytest.mark.parametrize("form", ["rows, mini-batches kept", "rows", "keys"])
def test_every_mini_batch_keeps_its_rows_and_is_balanced(form):
    """R15."""
    trainer = trainer_of(ppo_mini_batch_size=4, rollout_n=4)
    if form == "keys":
        rows, metrics = balance_keys(trainer)
    else:
        rows, metrics = balance(trainer, keep_minibatch=form != "rows")
    for index, rows_by_rank in enumerate(slices_of(rows, minibatch_rows=16)):
        assert set(rows_by_rank.reshape(-1)) == set(range(16 * index, 16 * index + 16))
        costs = work(LENGTHS[rows_by_rank])
        # What no partition into equal counts beats: the mean, or the heaviest row with the three lightest.
        bound = max(costs.sum() / DP_SIZE, costs.max() + np.sort(costs, axis=None)[:3].sum())
        assert costs.sum(axis=1).max() <= 1.02 * bound
    assert metrics["global_seqlen/balanced_max"] < metrics["global_seqlen/max"]


def test_batches_of_the_prefix_grouper_are_verls():
    """It keeps the rows of a uid together; uids that ranks do not divide are refused in verl's words."""
    trainer, uids = trainer_of(ppo_mini_batch_size=8, rollout_n=4, use_prefix_grouper=True), np.repeat(np.arange(16), 4)
    rows, _ = balance(trainer, uids=uids)
    assert all(len(set(uids[part])) == 4 for part in rows.reshape(DP_SIZE, -1))
    with pytest.raises(ValueError, match="num_uid_groups"):
        balance(trainer, uids=np.minimum(uids, 14))
