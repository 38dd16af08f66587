"""verl's losses count the whole mini-batch, so that they do not depend on which rows share a micro-batch; one does."""

import logging

import pytest
import torch
from tensordict import TensorDict
from test_verl_trainer import balance, trainer_of
from verl.utils import seqlen_balancing, tensordict_utils
from verl.workers.config import FSDPActorConfig
from verl.workers.utils.losses import ppo_loss
from verl_batches import installed

PROMPTS, RESPONSES = [5, 3, 8, 2, 4, 6], [3, 40, 7, 20, 11, 2]
ONE_BY_ONE = [[row] for row in range(6)]
NORM = "seq-mean-token-sum-norm"


def nested(rows):
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


def batch_of_rollouts():
    generator = torch.Generator().manual_seed(0)
    keys = {name: nested([torch.randn(n, generator=generator) for n in RESPONSES]) for name in ("old", "advantages")}
    sizes = {"prompts": PROMPTS, "responses": RESPONSES, "input_ids": [*map(sum, zip(PROMPTS, RESPONSES, strict=True))]}
    tokens = {name: nested([torch.ones(n, dtype=torch.long) for n in lengths]) for name, lengths in sizes.items()}
    columns = {"response_mask": tokens["responses"], "old_log_probs": keys.pop("old"), **keys, **tokens}
    return TensorDict(columns, batch_size=[len(RESPONSES)])


def gradient(batch, slots, **config):
    """Of the log-probabilities of all tokens, summed over micro-batches of these rows."""
    actor = FSDPActorConfig(
        strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, ppo_mini_batch_size=6, **config
    )
    rows = [torch.zeros(prompt + n, requires_grad=True) for prompt, n in zip(PROMPTS, RESPONSES, strict=True)]
    for slot in slots:
        micro_batch = tensordict_utils.index_select_tensor_dict(batch, torch.tensor(slot))
        counts = {"batch_num_tokens": sum(RESPONSES), "global_batch_size": len(RESPONSES)}
        tensordict_utils.assign_non_tensor(micro_batch, dp_size=1, **counts)
        ppo_loss(actor, {"log_probs": nested([rows[row] for row in slot])}, micro_batch)[0].backward()
    return torch.cat([row.grad for row in rows if row.grad is not None])


@pytest.mark.parametrize(
    ("mode", "factor"),
    [
        *((mode, None) for mode in ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", NORM)),
        (NORM, 64),
    ],
)
def test_the_gradient_is_that_of_rows_alone(mode, factor):
    batch = batch_of_rollouts()
    with installed():
        _, slots = seqlen_balancing.rearrange_micro_batches(batch, max_token_len=50)
    assert 1 < len(slots) < 6
    one, other = (gradient(batch, rows, loss_agg_mode=mode, loss_scale_factor=factor) for rows in (slots, ONE_BY_ONE))
    # Without a factor it divides by the longest response of a micro-batch.
    assert torch.allclose(one, other) == (mode != NORM or factor is not None)


@pytest.mark.parametrize(
    ("mode", "factor", "warns"), [(NORM, None, True), (NORM, 64, False), ("token-mean", None, False)]
)
def test_the_loss_that_depends_on_micro_batches_is_named(mode, factor, warns, caplog):
    trainer = trainer_of(ppo_mini_batch_size=8)
    vars(trainer.config.actor_rollout_ref.actor).update(loss_agg_mode=mode, loss_scale_factor=factor)
    with installed(), caplog.at_level(logging.WARNING):
        for _ in range(2):
            balance(trainer)
    assert [("actor.loss_scale_factor" in line) for line in caplog.messages] == [True] * warns
