"""Training loops of hosts without Megatron on gloo ranks, and the same steps sample by sample on one rank."""

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

from megatron_balance.loaders import BalancedBatchSampler

VOCABULARY = 50
LENGTHS = np.clip(np.random.default_rng(0).lognormal(3, 0.8, 48), 4, 120).astype(int)


def rows():
    """Tokens of each sample."""
    generator = np.random.default_rng(1)
    return [generator.integers(0, VOCABULARY, length).tolist() for length in LENGTHS]


class Recurrent(nn.Module):
    """Predicts the next token from those before it."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 16)
        self.layer = nn.GRU(16, 16, batch_first=True)
        self.output = nn.Linear(16, VOCABULARY)

    def forward(self, samples):
        """Losses of all samples' labels, summed."""
        total = torch.zeros(())
        for sample in samples:
            tokens = torch.tensor(sample)
            logits = self.output(self.layer(self.embedding(tokens[None, :-1]))[0])[0]
            total = total + nn.functional.cross_entropy(logits, tokens[1:], reduction="sum")
        return total


def norm_of(model):
    """Gradient norm over all ranks."""
    gradients = [parameter.grad for parameter in model.parameters()]
    whole = [grad.full_tensor() if hasattr(grad, "full_tensor") else grad for grad in gradients]
    return float(torch.stack([grad.norm() for grad in whole]).norm())


def fsdp2():
    """(loss, gradient norm) of each step: sharded over ranks in balanced micro-batches, and alone."""
    torch.manual_seed(0)
    model, alone = Recurrent(), Recurrent()
    alone.load_state_dict(model.state_dict())
    fully_shard(model)
    samples = rows()
    sampler = BalancedBatchSampler(LENGTHS, global_batch_size=16, num_microbatches=2, max_tokens=400)
    loader = DataLoader(samples, batch_sampler=sampler, collate_fn=list)
    found = []
    micro_batches = iter(loader)
    for step in range(sampler.num_steps):
        batches = [next(micro_batches) for _ in range(2)]
        labels = torch.tensor(float(sum(len(sample) - 1 for batch in batches for sample in batch)))
        dist.all_reduce(labels)
        model.zero_grad()
        loss = torch.zeros(())
        for batch in batches:
            part = model(batch) * dist.get_world_size() / labels
            part.backward()
            loss += part.detach() / dist.get_world_size()
        dist.all_reduce(loss)
        alone.zero_grad()
        positions = sorted(position for rank in sampler.plan(0, step) for slot in rank for position in slot)
        whole = [alone([samples[position]]) / labels for position in positions]
        torch.stack(whole).sum().backward()
        found.append(((float(loss), norm_of(model)), (float(sum(whole)), norm_of(alone))))
    return found
