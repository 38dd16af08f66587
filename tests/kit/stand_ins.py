"""Stand-ins for what a CPU lacks, and faults: functions that are called in a rank before it trains (watched_steps.py).

Each takes the rank's `Watch` first. They change Megatron, the script, its data set or this process; none changes the
package.
"""

import functools
import os
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pretrain_sft
import torch
from megatron.core import mpu
from megatron.training import training
from sft_dataset import SftDataset
from torch import Tensor

Row = dict[str, Tensor]


def change_rows(change):
    """Have every data set hand out `change(data_set, index, row)` for a row."""
    stock = SftDataset.__getitem__
    SftDataset.__getitem__ = lambda self, index: change(self, index, stock(self, index))


def loss_error(watch, *, relative):
    """Falsify the loss, and so the gradients, of one of the samples that this rank reads first."""
    stock = pretrain_sft.loss_func
    pretrain_sft.loss_func = lambda mask, output: stock(mask, output * (1 + relative))


def small_blocks(watch, *, block=4):
    """Hash samples in blocks of so few tokens, for short ones."""
    from megatron_balance.mcore import prepare

    prepare.hash_chains = functools.partial(prepare.hash_chains, block=block)


def equal_hashes(watch, *, num_tokens=4):
    """The same hash for the first tokens of all samples."""
    from megatron_balance.mcore import prepare

    stock = prepare.hash_chains

    def short(*positional, **keywords):
        chains = stock(*positional, **keywords)
        return replace(chains, hashes=np.where(chains.ends == num_tokens, np.uint64(0), chains.hashes))

    prepare.hash_chains = short


def fail_to_hash(watch, *, rank=1):
    """Hashing ends with an error on this rank alone."""
    from megatron_balance.mcore import prepare

    def fail(*_, **__):
        raise MemoryError("no room for hashes")

    if int(os.environ["RANK"]) == rank:
        prepare.hash_chains = fail


def stubborn_layer(watch):
    """Let the second layer of a model attend without its core attention."""
    from megatron.core.transformer.attention import SelfAttention

    stock = SelfAttention.forward

    def forward(self, states, *positional, **keywords):
        return (states, None) if self.layer_number == 2 else stock(self, states, *positional, **keywords)

    SelfAttention.forward = forward


def loader_workers(watch):
    """Let the loader's processes run: their pinning thread asks for the device of an accelerator."""
    torch.accelerator.current_device_index = lambda: 0
    torch.accelerator.set_device_index = lambda index: None


def whole_counts(watch):
    """Take counts of tokens as the fused loss of Transformer Engine 2.18 does: whole numbers alone."""
    from megatron.core.transformer.moe import router

    stock = router.switch_load_balancing_loss_func

    def whole(*positional, total_num_tokens, **keywords):
        assert isinstance(total_num_tokens, int) or total_num_tokens.dtype == torch.int64
        return stock(*positional, total_num_tokens=total_num_tokens, **keywords)

    router.switch_load_balancing_loss_func = whole


def helpers_fail(watch, *, step):
    """As a step begins, the planning process of each rank is killed, and the disk of the first one's record is full.

    That of the second one hangs from the start: a pipe that nobody reads. Batches of any size are planned there.
    """
    from megatron_balance.mcore import plan_process

    plan_process.MIN_SAMPLES = 1
    record = Path(sys.argv[sys.argv.index("--balance-record") + 1])
    if os.environ["RANK"] == "1":
        record.mkdir(parents=True, exist_ok=True)
        os.mkfifo(record / "seconds_rank00001.jsonl")

    def strike(now):
        if now != step:
            return
        workers = [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if _is_worker(pid)]
        assert len(workers) == 1, "it plans in a process of its own"
        os.kill(workers[0], signal.SIGKILL)
        for number in os.listdir("/proc/self/fd"):
            path = Path(f"/proc/self/fd/{number}")
            if path.exists() and os.readlink(path).startswith(str(record)):
                os.dup2(os.open("/dev/full", os.O_WRONLY), int(number))

    watch.before_step.append(strike)


def _is_worker(pid):
    try:
        stat, command = (Path(f"/proc/{pid}/{name}").read_bytes() for name in ("stat", "cmdline"))
    except OSError:
        return False
    return int(stat.rpartition(b")")[2].split()[1]) == os.getpid() and b"import serve" in command


def device_memory(watch):
    """Counters of torch's allocator on devices of 80 GiB, of which rank 1 has filled more."""
    gib, rank = 2**30, int(os.environ["RANK"])
    torch.cuda.mem_get_info = lambda: ((80 - 20 - 5) * gib, 80 * gib)  # 5 GiB are no allocation of torch
    torch.cuda.memory_reserved = lambda: 20 * gib
    torch.cuda.memory_allocated = lambda: 12 * gib
    torch.cuda.max_memory_allocated = lambda: (22 + 10 * rank) * gib
    torch.cuda.max_memory_reserved = lambda: (30 + 10 * rank) * gib


def counting_allocator(watch, *, total, static, each_token, noise=0.0, full_at=0):
    """torch's counters on a device where each token of a micro-batch takes up to `noise` more bytes than it should.

    What was reserved stays so. In the step `full_at` nothing is left.
    """
    rng, forward, peak = np.random.default_rng(int(os.environ["RANK"])), pretrain_sft.forward_step, static

    def forward_step(*positional, **keywords):
        nonlocal peak
        output = forward(*positional, **keywords)
        tokens = (watch.microbatches() or [{}])[-1].get("tokens", 0)
        peak = max(peak, static + int(tokens * each_token * (1 + noise * rng.uniform())))
        if peak > total or watch.num_steps == full_at:
            raise torch.OutOfMemoryError("a stand-in for a device")
        return output

    pretrain_sft.forward_step = forward_step
    torch.cuda.mem_get_info = lambda: (total - peak, total)
    torch.cuda.memory_allocated = lambda: static
    torch.cuda.memory_reserved = torch.cuda.max_memory_reserved = torch.cuda.max_memory_allocated = lambda: peak


def made_up_seconds(watch, *, launch, token, squared, waits=False, noise=0.0, slowness=()):
    """Have micro-batches take so many seconds, a token and a squared token, whatever this machine does.

    Ranks that meet within a micro-batch take as long as the slowest of all where the run `waits`; experts are shared.
    """
    from megatron_balance.mcore import telemetry

    stock = telemetry.Telemetry.begin

    def begin(self, step, *, iteration):
        stock(self, step, iteration=iteration)
        if self._timer is not None:
            self._timer.plan = step.schedule

    def seconds(timer, **_):
        plan = timer.plan
        lengths = plan.lengths.astype(float)
        costs, width = plan.cost_model, plan.topology.ep_dp_size
        experts = costs.expert_linear / (costs.linear + costs.expert_linear) if width > 1 else 0.0
        tokens, squares = (
            np.bincount(plan.microbatch_of, of, plan.cp_size_grid.size).reshape(plan.cp_size_grid.shape)
            for of in (lengths, lengths**2)
        )
        means = tokens.reshape(-1, width, tokens.shape[1]).mean(axis=1).repeat(width, axis=0)
        grid = launch + token * ((1 - experts) * tokens + experts * means) + squared * squares
        grid *= np.exp(noise * np.random.default_rng(timer.iteration).standard_normal(grid.shape))
        if slowness:
            grid *= np.array(slowness)[:, None]
        if waits:
            grid[:] = grid.max(axis=0)
        return grid[mpu.get_data_parallel_rank(), : timer.num_microbatches]

    telemetry.Telemetry.begin = begin
    telemetry.StepTimer.seconds = seconds


def mtp_attention(watch=None):
    """Give layers of multi-token prediction an attention that takes packed sequences on a CPU.

    From 0.19 Megatron makes the specs of these layers itself, whatever `--spec` says.
    """
    from megatron.training.models import gpt
    from thd_attention import thd_layer_spec

    specs = gpt.get_gpt_decoder_layer_specs
    gpt.get_gpt_decoder_layer_specs = lambda *positional, **keywords: [
        thd_layer_spec(spec) for spec in specs(*positional, **keywords)
    ]


def mtp_ratio_of_one(watch):
    """Have shifts keep the number of learned tokens: Megatron weighs a rank's predictions by before over after.

    A shift moves tokens between the ranks that share a sequence, so this ratio depends on the context-parallel size.
    """
    from megatron.core.transformer import multi_token_prediction

    shifted = multi_token_prediction.roll_tensor
    multi_token_prediction.roll_tensor = lambda tensor, *positional, **keywords: (
        shifted(tensor, *positional, **keywords)[0],
        None if tensor is None else tensor.sum(),
    )


def precision_settings(watch, *, settings):
    """Have Megatron's arguments say FP8 or FP4 once the model is made, whose layers a CPU has not."""
    from megatron.training import get_args, training

    stock = training.setup_model_and_optimizer

    def then_say(*positional, **keywords):
        made = stock(*positional, **keywords)
        vars(get_args()).update(settings)
        return made

    training.setup_model_and_optimizer = then_say


def filler(watch):
    """Fill micro-batches up to a multiple of 64 tokens on each rank, as FP8 layers would have them."""
    from megatron_balance.mcore.setup import settings

    settings.token_alignment = lambda options: 64


def amax_reduction(watch):
    """Reduce a number over Megatron's group of amaxes in every forward and backward, as `delayed` FP8 layers do."""
    from megatron.core.transformer.transformer_block import TransformerBlock

    stock = TransformerBlock.forward

    def reduce(_=None):
        torch.distributed.all_reduce(torch.zeros(1), group=mpu.get_amax_reduction_group(with_context_parallel=True))

    def forward(block, *positional, **keywords):
        output = stock(block, *positional, **keywords)
        reduce()
        if output.requires_grad:
            output.register_hook(reduce)
        return output

    TransformerBlock.forward = forward


def two_documents(watch):
    """Rows of validation hold two documents each."""

    def split(data, index, row):
        total = row["tokens"].numel()
        starts = {"cu_seqlens": torch.tensor([0, 96, total], dtype=torch.int32)}
        starts["max_seqlen"] = torch.tensor(total - 96, dtype=torch.int32)
        return row | starts if data.split.name == "valid" else row

    change_rows(split)


def padded_rows(watch):
    """Rows that name no starts of sequences, and a forward step written for them, as in pretrain_gpt.py."""
    keys = ("tokens", "labels", "loss_mask", "position_ids")
    change_rows(lambda data, index, row: {name: row[name] for name in keys})
    pretrain_sft.forward_step = _forward_rows


def _forward_rows(data_iterator, model):
    # A stage between the first and the last reads nothing; a rank counts the sequences that it knows of.
    at_an_end = mpu.is_pipeline_first_stage() or mpu.is_pipeline_last_stage()
    batch = pretrain_sft.get_batch(data_iterator, packed=False) if at_an_end else dict.fromkeys(pretrain_sft.BATCH_KEYS)
    if (starts := batch["cu_seqlens"]) is not None:
        training.update_seqlen_stats_from_cu_seqlens(starts.squeeze(0))
    output = model(batch["tokens"], batch["position_ids"], batch["attention_mask"], labels=batch["labels"])
    return output, functools.partial(pretrain_sft.loss_func, batch["loss_mask"])


def data_at_the_ends(watch):
    """No data set on stages between the first and the last, as in Megatron's scripts for documents."""
    stock = pretrain_sft.datasets_provider

    @functools.wraps(stock)
    def datasets_provider(*positional, **keywords):
        at_an_end = mpu.is_pipeline_first_stage() or mpu.is_pipeline_last_stage()
        return stock(*positional, **keywords) if at_an_end else (None, None, None)

    pretrain_sft.datasets_provider = datasets_provider


def struck(watch, *, step, number=signal.SIGKILL):
    """A rank gets a signal as a step begins."""

    def strike(now):
        if now == step:
            time.sleep(0.2)  # messages of the step before are through
            os.kill(os.getpid(), number)

    watch.before_step.append(strike)


def other_ties(watch):
    """A numpy that sorts equal elements in another order."""
    lexsort, argsort = np.lexsort, np.argsort

    def last_first(order):
        return len(order) - 1 - order

    np.lexsort = lambda keys: last_first(lexsort([np.asarray(key)[::-1] for key in keys]))
    np.argsort = lambda of, **keywords: last_first(argsort(np.asarray(of)[::-1], **keywords))


def slow_packs(watch):
    """A rank that packs micro-batches more slowly than the others end."""
    from megatron_balance.mcore import prepare

    stock = prepare.pack

    def pack(*positional, **keywords):
        time.sleep(2)
        return stock(*positional, **keywords)

    prepare.pack = pack


def without_the_package(watch, *, flags):
    """No hooks of the package, nor its flags."""
    from megatron_balance.mcore import hooks

    hooks.installation.undo()
    flags_there(watch, flags="", instead_of=flags)


def other_version(watch):
    """A clone of another commit: one version, other sources."""
    from megatron_balance.mcore import run
    from megatron_balance.version import __version__

    run.build_version = lambda: f"{__version__}+0000000000"


def flags_there(watch, *, flags, instead_of=""):
    """Other flags: `instead_of` is taken out of the command line, `flags` are added."""
    given = " ".join(sys.argv[1:])
    sys.argv[1:] = [*(given.replace(instead_of, "") if instead_of else given).split(), *flags.split()]


def bad_data(watch, *, how, index):
    """The data set raises, or has a wrong token, at this row."""

    def bad(data, at, row):
        if at == index and how == "raises":
            raise OSError(5, "the disk is gone")
        return row | {"tokens": torch.full_like(row["tokens"], -7)} if at == index else row

    change_rows(bad)


def schedule_plans(watch):
    """A forward step that gives a schedule plan where it is asked for one, as in pretrain_gpt.py: without starts."""
    stock = pretrain_sft.forward_step

    def forward_step(data_iterator, model, return_schedule_plan=False):
        if not return_schedule_plan:
            return stock(data_iterator, model)
        batch = pretrain_sft.get_batch(data_iterator)
        training.update_seqlen_stats_from_cu_seqlens(batch["cu_seqlens"].squeeze(0))
        inputs = batch["tokens"], batch["position_ids"], None
        plan = model.build_schedule_plan(*inputs, labels=batch["labels"], loss_mask=batch["loss_mask"])
        return plan, functools.partial(pretrain_sft.loss_func, batch["loss_mask"])

    pretrain_sft.forward_step = forward_step
