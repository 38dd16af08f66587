"""Hand-written training loops on each rank of a test world, by `balanced_schedule`.

Megatron's own schedule is a double that returns the micro-batches it is handed.
"""

import itertools
import threading
from argparse import Namespace
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_balance import BalanceError, CostModel
from megatron_balance.mcore import balanced_schedule
from megatron_balance.mcore.loop import run_of_model
from megatron_balance.mcore.run import run_of
from megatron_balance.runtime.process import set_device_kind

NUM_ITEMS = 2
"""Of a step."""

LAYOUTS = {"dp": 1, "pp": 2, "pp4": 4}
"""Pipeline-parallel sizes."""


class Model(torch.nn.Module):
    """What a loop's model tells of itself."""

    def __init__(self, **config):
        super().__init__()
        settings = {"num_layers": 4, "hidden_size": 8, "num_attention_heads": 2, **config}
        self.config = TransformerConfig(
            **settings,
            calculate_per_token_loss=True,
            attention_dropout=0.0,
            hidden_dropout=0.0,
            pipeline_model_parallel_size=parallel_state.get_pipeline_model_parallel_world_size(),
            pipeline_dtype=torch.float32,
        )

    def set_input_tensor(self, tensors):
        """Nothing is received."""


def stock_schedule(*, forward_step_func, data_iterator, model, num_microbatches, **_):
    """Stands for Megatron's: what the forward step returns for each micro-batch."""
    return [forward(forward_step_func, data_iterator, model[0], number) for number in range(num_microbatches)]


def forward(forward_step_func, data_iterator, model, number):
    """What the forward step returns for a micro-batch, called by Megatron's own function, which numbers it."""
    from megatron.core.pipeline_parallel import schedules

    results = []

    def step(*inputs):
        results.append(forward_step_func(*inputs))
        return torch.zeros(1), None

    schedules.forward_step(
        step, data_iterator, model, 1, None, [], model.config, 1, current_microbatch=number, is_last_stage=False
    )
    return results[0]


def balanced(
    layout="dp", *, flags=(), cap=16, schedule=stock_schedule, forward_step=None, config=None, device="cpu", **others
):
    """The steps of this rank in a layout, over `schedule` in place of Megatron's."""
    set_device_kind(device)
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(1, LAYOUTS[layout], create_gloo_process_groups=False)
    settings = {"cost": CostModel(linear=10, quadratic=1), "timeout": timedelta(minutes=2), **others}
    model = Model(**(config or {}))
    ours = balanced_schedule(schedule, model=model, max_tokens_per_gpu=cap, flags=flags, **settings)

    def step(iterator, *, num_items=NUM_ITEMS, forward_only=False):
        return ours(
            forward_step_func=forward_step or (lambda microbatches, model: next(microbatches)),
            data_iterator=iterator,
            model=[model],
            num_microbatches=num_items,
            seq_length=1024,
            micro_batch_size=1,
            decoder_seq_length=None,
            forward_only=forward_only,
        )

    step.ours = ours
    return step


def length_of(number):
    """Tokens of an item, so that steps differ in their lengths."""
    return 1 + number % 7


def row(*lengths, first=1):
    """Sequences of these lengths; all tokens of the n-th are `first + n`."""
    tokens = torch.arange(first, first + len(lengths)).repeat_interleave(torch.tensor(lengths))[None]
    return {
        "tokens": tokens,
        "labels": tokens,
        "loss_mask": torch.ones(1, sum(lengths)),
        "cu_seqlens": torch.tensor([[0, *itertools.accumulate(lengths)]], dtype=torch.int32),
        "max_seqlen": torch.tensor([max(lengths)], dtype=torch.int32),
    }


class Items:
    """Items numbered from `first`; `pulled` counts those that were asked for."""

    def __init__(self, first, *, end=None, fail=None, bad=None):
        self.first, self.end, self.fail, self.bad = first, end, fail, bad
        self.pulled, self.threads = 0, set[str]()

    def __iter__(self):
        return self

    def __next__(self):
        self.threads.add(threading.current_thread().name)
        index, self.pulled = self.pulled, self.pulled + 1
        if self.end is not None and index >= self.end:
            raise StopIteration
        if index == self.fail:
            raise OSError(5, "the disk is gone")
        item = row(length_of(self.first + index), first=self.first + index + 1)
        if index == self.bad:
            item["loss_mask"][0, 0] = float("nan")
        return item


class Replaying:
    """Stands for Megatron's iterator while it runs a step again: nothing may be pulled from it."""

    replaying = True


def numbers(microbatches):
    """Of the items in a step's micro-batches."""
    held = {token - 1 for microbatch in microbatches for token in microbatch["tokens"].flatten().tolist()}
    return sorted(held)


def lengths(microbatches):
    return sorted(
        length for microbatch in microbatches for length in microbatch["cu_seqlens"].diff().flatten().tolist() if length
    )


def steps_of_loop(*, loops, layout="dp", flags=None):
    """What this rank ran in every step, the error that ended it if one did, items pulled from `a`, threads that pulled.

    Samples stay on the rank that loads them, so that a step runs the items that its rank pulled; a stage that loads
    no data tells the lengths of its sequences. `loops` has for every rank a letter a step, the iterator that it comes
    with: `a` and `b` go on for ever, `e` ends after four items, `f` and `x` fail in place of their fifth and second,
    `m` has a third item that cannot be split, `n` is a new one with the next items of `a`, `r` has Megatron run the
    last step again, and `-` is a rank without one.
    """
    step_of = balanced(layout, flags=("--no-balance-data", "--no-balance-by-flops", *(flags or [])))
    first = 1000 * parallel_state.get_data_parallel_rank()
    iterators = {"a": Items(first), "b": Items(first + 500), "e": Items(first, end=4)}
    iterators |= {"f": Items(first, fail=4), "x": Items(first, fail=1), "m": Items(first, bad=2)}
    outcomes = []
    for step, name in enumerate(loops[dist.get_rank()]):
        new = Items(first + NUM_ITEMS * step, end=NUM_ITEMS)
        iterator = {"n": new, "r": Replaying(), "-": None}.get(name) or iterators.get(name)
        try:
            ran = step_of(iterator)
        except BalanceError as error:
            outcomes.append(str(error))
            break
        outcomes.append(lengths(ran) if iterator is None else numbers(ran))
    return outcomes, iterators["a"].pulled, sorted(iterators["a"].threads)


NOTHING = {"tokens": torch.empty(1, 0, dtype=torch.int64), "cu_seqlens": torch.zeros(1, 1).int()}


def dummies():
    """Tokens of this rank's masked micro-batches, where three samples are to fill four micro-batches."""
    packs = balanced(cap=256)(iter([row(200), NOTHING if dist.get_rank() else row(200)]))
    return [pack["tokens"].numel() for pack in packs if not pack["loss_mask"].any()]


def evaluated(*, collects):
    """Tokens of each micro-batch of a balanced evaluation of two items."""
    balanced()
    flags = ["--max-tokens-per-gpu", "16", "--no-balance-data", "--no-balance-by-flops"]
    cost = CostModel(linear=10, quadratic=1)
    run = run_of_model(Model(), flags=flags, cost=cost, eval_iters=1, distributed_timeout_minutes=2)
    run._args = Namespace(iteration=0, curr_iteration=0)
    ran = []

    def schedule(**given):
        ran.extend(stock_schedule(**given))
        return []

    words = {"forward_only": True, "model": [Model()], "forward_step_func": lambda items, _: next(items)}
    run_of(run, lambda: run)  # for hooks
    with run.evaluating(1):
        run(schedule, data_iterator=Items(0), num_microbatches=NUM_ITEMS, collect_non_loss_data=collects, **words)
    return [microbatch["tokens"].numel() for microbatch in ran]


def counted_by_routers(*, tokens):
    """This rank's part and the number of tokens that a router counts, where ranks have so many without padding."""
    from megatron.core.transformer.moe import router

    routed = torch.arange(4)[:, None] < torch.tensor([tokens[dist.get_rank()], 0])
    words = {"reduce_group": dist.group.WORLD, "topk": 1, "with_padding_mask": True}

    def count(microbatches, model):
        _, part, total = router.get_tokens_per_expert_and_token_count(routed, **words)
        return float(part), int(total)

    return balanced(config={"num_moe_experts": 2, "add_bias_linear": False}, forward_step=count)(Items(0))[0]


def step_that_fails(*, kind):
    """The error of a step: `not packed`, `no tokens`: what the loader yields; `read twice`: a step that reads ahead.

    `plans differ`: numpy sorts otherwise on rank 1. `stages`: two pipelines of two stages; the last stage of the
    second reads other lengths than its first. Samples stay, so that both stages of the first pipeline run the same
    packs: only the plan of their data-parallel groups tells them that they do not make the same step.
    """
    items = [NOTHING] * NUM_ITEMS
    settings = {"timeout": timedelta(minutes=1)}
    argsort = np.argsort
    if kind == "not packed":
        items = [{"tokens": torch.ones(1, 8, dtype=torch.int64), "loss_mask": torch.ones(1, 8)}] * NUM_ITEMS
    elif kind == "read twice":
        items = [row(4), row(5)]
        settings["forward_step"] = lambda microbatches, model: [next(microbatches), next(microbatches)]
    elif kind == "plans differ":
        items = [row(9, 2, 3), row(6, 3, 1)]
    elif kind == "stages":
        items = [row(length) for length in ((4, 4, 4, 4), (3, 5, 2, 6), (4, 4, 4, 4), (3, 6, 5, 2))[dist.get_rank()]]
        settings |= {"layout": "pp", "flags": ("--no-balance-data", "--no-balance-by-flops"), "cap": 8}
    step_of = balanced(**settings)
    if kind == "plans differ" and dist.get_rank() == 1:
        np.argsort = lambda values, *rest, **how: argsort(values, *rest, **how)[::-1]
    try:
        step_of(iter(items), num_items=len(items))
    except BalanceError as error:
        return str(error)
    finally:
        np.argsort = argsort
    raise AssertionError("a step was made")


def weighted_gradients(*, weighting, num_results=3):
    """The gradient of every learned token of a step on this rank, by its sample's number; or the error.

    Rank r has two items: sequences of 1, 2 and of 3 tokens and more, the first token of each without a loss; they carry
    `rollout` and `weight`.
    """
    passes = []

    def items():
        for item in range(2 * NUM_ITEMS):
            number = 10 * dist.get_rank() + 2 * item + 1
            batch = row(2 + item, 5 + dist.get_rank(), first=number)
            batch["loss_mask"][0, [0, 2 + item]] = 0
            batch["rollout"] = torch.tensor([number % 3, 7])
            yield batch | {"weight": torch.tensor([0.5, 2.0 + dist.get_rank()])}

    def forward_step(microbatches, model):
        batch = next(microbatches)
        losses = batch["tokens"].float().requires_grad_()

        def loss_func(losses):
            loss, num_tokens = (losses * batch["loss_mask"]).sum(), batch["loss_mask"].sum().int()
            return (loss, num_tokens, {})[:num_results]

        passes.append((batch, losses))
        return losses, loss_func

    def schedule(*, forward_step_func, data_iterator, model, num_microbatches, **_):
        from megatron.core.pipeline_parallel import schedules

        gradients = {}
        for number in range(num_microbatches):
            inputs = (forward_step_func, data_iterator, model[0], num_microbatches, None, [], model[0].config, 1)
            loss, _ = schedules.forward_step(*inputs, current_microbatch=number)
            loss.backward()
            batch, losses = passes[-1]
            is_learned = batch["loss_mask"] > 0
            gradients |= zip(batch["tokens"][is_learned].tolist(), losses.grad[is_learned].tolist(), strict=True)
        return gradients

    step = balanced(flags=("--balance-loss-weighting", weighting), cap=12, schedule=schedule, forward_step=forward_step)
    try:
        return step(items())
    except BalanceError as error:
        return str(error)
