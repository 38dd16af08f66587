"""A training run of Megatron-Bridge on CPU ranks: its own `pretrain`, packed SFT data set, forward step and evaluation.

Megatron's local layers with packed attention take the place of Transformer Engine's; `absent_packages.py` stands in
for the rest. The variable BRIDGE holds the arguments of `config_of` as JSON, and `install`, those of
`install_bridge`.
"""

import json
import os
import sys
from pathlib import Path

import absent_packages  # noqa: F401 - before Megatron-Bridge
import numpy as np
import torch
import torch.distributed as dist
from forked import train_here
from megatron.bridge.data.builders.gpt_sft import GPTSFTDatasetConfig
from megatron.bridge.data.packing.config import PackedSequenceSpecs
from megatron.bridge.models.gpt_provider import GPTModelProvider
from megatron.bridge.training import config as bridge
from megatron.bridge.training import eval as bridge_eval
from megatron.bridge.training import train as bridge_train
from megatron.bridge.training.callbacks import Callback
from megatron.bridge.training.gpt_step import forward_step
from megatron.bridge.training.pretrain import pretrain
from megatron.core.tokenizers.text.libraries.null_tokenizer import NullTokenizer
from thd_attention import thd_block_spec

from megatron_balance.mcore import bridge as ours
from megatron_balance.mcore.run import current

__all__ = ["main", "train_here"]

SEQ_LENGTH = 128
VOCAB_SIZE = 128
NUM_STEPS = 4
NUM_PACKS = 12
"""Packs of a global batch."""

NullTokenizer.eos_id = property(lambda self: self.eod)  # the data set asks for it


def main():
    """Train, and write a line a step and one for evaluations."""
    folder, rank = Path(sys.argv[1]), int(os.environ["RANK"])
    settings = json.loads(os.environ["BRIDGE"])
    install = settings.pop("install", None)
    dist.init_process_group("gloo")
    if rank == 0:
        for seed, name in enumerate(("training", "validation")):
            write_packs(folder / f"{name}.npy", seed=seed)
        (folder / "metadata.jsonl").write_text("[]")
    dist.barrier()
    stock = functions()
    installed = None if install is None else ours.install_bridge(**install)
    recorder = Recorder()
    pretrain(config_of(folder, **settings), forward_step, callbacks=[recorder])
    if installed is not None:
        installed.undo()
        recorder.of_run["restored"] = functions() == stock
    with (folder / f"rank{rank}.jsonl").open("w") as out:
        out.writelines(json.dumps(row | recorder.of_run) + "\n" for row in recorder.rows)
    dist.destroy_process_group()


def functions():
    """The functions that hooks replace."""
    return [bridge_train.train_step, bridge_eval.evaluate, bridge_eval.get_forward_backward_func]


class Recorder(Callback):
    """Keeps the figures of steps and evaluations."""

    def __init__(self):
        self.rows = []
        self._trained = None
        self.of_run = {"evaluations": [], "balanced_evaluations": 0}

    def on_train_step_end(self, context):
        assert context.loss_dict is not None
        row = {name.replace(" ", "_"): float(value) for name, value in context.loss_dict.items()}
        run = current()
        if run is not None:
            self._trained = run.last_step
            schedule = run.last_step.schedule
            row |= {"lengths": schedule.lengths.tolist(), "imbalance": schedule.cost_grid.sum(1).tolist()}
            row |= {"ranks": [[list(slot) for slot in slots] for slots in schedule.ranks]}
        self.rows.append(row | {"grad_norm": float(context.grad_norm)})

    def on_eval_end(self, context):
        self.of_run["evaluations"].append([float(value) for value in (context.total_loss_dict or {}).values()])
        run = current()
        self.of_run["balanced_evaluations"] += run is not None and run.last_step is not self._trained


def config_of(folder, *, model=None, loader="batch"):
    """Bridge's configuration, with the data set of a folder; `model` has settings in place of those below."""
    of_model = {
        "num_layers": 2,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "ffn_hidden_size": 64,
        "seq_length": SEQ_LENGTH,
        "vocab_size": VOCAB_SIZE,
        "transformer_layer_spec": thd_block_spec,
        "normalization": "RMSNorm",
        "position_embedding_type": "rope",
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "calculate_per_token_loss": True,
        "moe_token_dispatcher_type": "alltoall",
        "pipeline_dtype": torch.float32,
        # Stages of a stock run exchange packs of one length otherwise, and Bridge pads them to a multiple of 16 each.
        "variable_seq_lengths": True,
    }
    fusions = ("bias_activation", "masked_softmax", "bias_dropout", "cross_entropy_loss", "gradient_accumulation")
    of_model |= {f"{name}_fusion": False for name in fusions}
    of_model |= {"apply_rope_fusion": False, "persist_layer_norm": False}
    cp_size = (model or {}).get("context_parallel_size", 1)
    return bridge.ConfigContainer(
        train=bridge.TrainingConfig(train_iters=NUM_STEPS, global_batch_size=NUM_PACKS, micro_batch_size=1),
        validation=bridge.ValidationConfig(eval_interval=2, eval_iters=2),
        model=GPTModelProvider(**of_model | dict(model or {})),
        optimizer=bridge.OptimizerConfig(lr=1e-3, min_lr=1e-3, clip_grad=1.0, bf16=False, fp16=False),
        ddp=bridge.DistributedDataParallelConfig(use_distributed_optimizer=False),
        scheduler=bridge.SchedulerConfig(
            lr_decay_style="constant", lr_warmup_iters=0, start_weight_decay=0.0, end_weight_decay=0.0
        ),
        dataset=GPTSFTDatasetConfig(
            seq_length=SEQ_LENGTH,
            dataset_root=folder,
            enable_offline_packing=True,
            offline_packing_specs=PackedSequenceSpecs(
                packed_sequence_size=SEQ_LENGTH,
                packed_train_data_path=folder / "training.npy",
                packed_val_data_path=folder / "validation.npy",
                packed_metadata_path=folder / "metadata.jsonl",
                pad_seq_to_mult=2 * cp_size if cp_size > 1 else 1,
            ),
            do_test=False,
            dataloader_type=loader,
            num_workers=0,
            persistent_workers=False,
            pin_memory=False,
        ),
        logger=bridge.LoggerConfig(log_interval=2),
        tokenizer=bridge.TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=VOCAB_SIZE),
        checkpoint=bridge.CheckpointConfig(save=None, load=None),
        dist=bridge.DistributedInitConfig(distributed_backend="gloo"),
    )


def write_packs(path, *, seed):
    """Packs of one to three sequences of very different lengths, as Bridge's offline packing writes them."""
    rng = np.random.default_rng(seed)
    packs = []
    for _ in range(NUM_PACKS * NUM_STEPS):
        lengths = 4 * np.clip(rng.lognormal(1.5, 0.9, rng.integers(1, 4)).astype(np.int64), 1, SEQ_LENGTH // 12) + 1
        starts = [0, *np.cumsum(lengths).tolist()]
        packs.append(
            {
                "input_ids": rng.integers(1, VOCAB_SIZE - 2, starts[-1]).tolist(),
                "seq_start_id": starts[:-1],
                "loss_mask": rng.integers(0, 2, starts[-1]).tolist(),
            }
        )
    np.save(path, np.array(packs, dtype=object), allow_pickle=True)
