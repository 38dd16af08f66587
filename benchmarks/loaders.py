"""Micro-batches without Megatron: each host's stock order, the host's own best, and this package's.

Plans are those of the hosts' real samplers on whole sets of lengths. Trained are Trainer and TRL on two CPU ranks, at a
learning rate of 0, so that each step's loss and gradient norm can be computed alone, sample by sample. Needs the
environment of `scripts/check adapters hf`: PYTHON=.venv-hf/bin/python scripts/bench loaders
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from datasets import Dataset
from gloo_ranks import run_ranks
from numpy.typing import NDArray
from tokenizers import Tokenizer, models
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from transformers.trainer_pt_utils import BatchRebalanceSampler, LengthGroupedSampler
from trl import SFTConfig, SFTTrainer, pack_dataset

from benchmarks.planner.setups import add_length_options, lengths_folder, lengths_said
from benchmarks.publish import Measured, table
from megatron_balance import CostModel, ModelShape
from megatron_balance.lengths import synthetic_lengths
from megatron_balance.loaders import BalancedBatchSampler, balance_trainer

TITLE = "Without Megatron"
SETS = {"azure_conv": 4, "servegen_mlarge": 4, "code_files": 8}
"""Micro-batches of each rank in a step, by set."""

CAP, RANKS, STEP = 16384, 8, 256
MODEL: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4}
MODEL |= {"vocab_size": 128, "attn_implementation": "by_sample"}
SETTINGS: dict[str, Any] = {"learning_rate": 0.0, "max_grad_norm": 1e9, "num_train_epochs": 1, "save_strategy": "no"}
SETTINGS |= {"logging_steps": 1, "report_to": [], "disable_tqdm": True, "use_cpu": True, "bf16": False}
SETTINGS |= {"gradient_accumulation_steps": 4, "dataloader_drop_last": True}
LINES = {"random": 0, "group_by_length": 1, "batch_rebalance": 1, "packing": 1, "ours": 2}
TRAINED = {
    ("Trainer", "padded"): ("random", "group_by_length", "batch_rebalance", "ours"),
    ("Trainer", "packed"): ("random", "batch_rebalance", "ours"),
    ("TRL", "packed"): ("random", "packing", "ours"),
}
add_options = add_length_options


def measure(args: argparse.Namespace) -> Measured:
    """Plans every set by every order, and trains every host."""
    folder = lengths_folder(args)
    plans: dict[str, dict[str, list[float]]] = {}
    for name, number in SETS.items():
        for order, slots in orders(draw(name, folder=folder, size=4096), number=number).items():
            plans.setdefault(order, {})[name] = slots
    lengths = np.clip(draw("code_files", folder=folder, size=96) // 8, 8, 1024).tolist()
    trained = []
    for host, layout, order in ((*key, order) for key, chosen in TRAINED.items() for order in chosen):
        ranks = run_ranks(2, "benchmarks.loaders:train", host=host, layout=layout, order=order, lengths=lengths)
        trained.append([host, layout, order, *figures_of_ranks(ranks, lengths=lengths, layout=layout), LINES[order]])
    figures = {"lengths": lengths_said(folder), "plans": plans, "trained": trained}
    return Measured(figures, problems=[f"{row}" for row in trained if max(row[7:9]) > 1e-5])


def draw(name: str, *, folder: Path | None, size: int) -> NDArray[np.int64]:
    known = synthetic_lengths(name, num_samples=size) if folder is None else np.load(folder / f"{name}.npz")["length"]
    return np.minimum(np.random.default_rng(1).choice(known, size), CAP)


def orders(lengths: NDArray[np.int64], *, number: int) -> dict[str, list[float]]:
    """`slot_figures` by order and layout."""
    model, size = CostModel.from_shape(ModelShape.preset("Qwen3-8B")), STEP // number // RANKS
    known, generator = lengths.tolist(), torch.Generator().manual_seed(0)
    grouped = list(LengthGroupedSampler(size * number, lengths=known, generator=generator))
    rebalanced = [BatchRebalanceSampler(known, STEP, RANKS, number, rank=rank) for rank in range(RANKS)]
    options: dict[str, Any] = {"global_batch_size": STEP, "num_microbatches": number, "max_tokens": CAP}
    options |= {"model": model, "num_replicas": RANKS, "rank": 0}
    batches: dict[str, list[Any]] = {
        "random": [np.random.default_rng(0).permutation(lengths.size).reshape(-1, size)] * 2,
        "group_by_length": [np.array(grouped).reshape(-1, size)] * 2,
        "batch_rebalance": [[batch for slot in zip(*rebalanced, strict=True) for batch in slot]] * 2,
        "ours": [list(BalancedBatchSampler(lengths, padded=padded, **options).all_ranks()) for padded in (True, False)],
    }
    figures = {
        f"{order}, {layout}": slot_figures(
            [lengths[list(ids)] for ids in rows], model=model, layout=layout, ranks=RANKS
        )
        for order, layouts in batches.items()
        for layout, rows in zip(("padded", "packed"), layouts, strict=True)
    }
    samples = Dataset.from_dict({"input_ids": [[0] * length for length in known]})
    packs = list(map(np.array, pack_dataset(samples, seq_length=CAP, strategy="bfd")["seq_lengths"]))
    shuffled = [packs[index] for index in np.random.default_rng(0).permutation(len(packs) // RANKS * RANKS)]
    return figures | {"packing, packed": slot_figures(shuffled, model=model, layout="packed", ranks=RANKS)}


def slot_figures(batches: Sequence[NDArray[np.int64]], *, model: CostModel, layout: str, ranks: int) -> list[float]:
    """Slowest rank over mean of a slot by FLOPs, padding, and tokens of the largest, of batches slot by slot."""
    rows = [np.full(batch.size, batch.max()) if layout == "padded" else batch for batch in batches]
    costs = np.array([float(sum(model(int(length)) for length in row)) for row in rows]).reshape(-1, ranks)
    tokens = [int(row.sum()) for row in rows]
    padding = sum(tokens) / sum(int(batch.sum()) for batch in batches)
    return [float(costs.max(axis=1).sum() * ranks / costs.sum()), padding, max(tokens)]


def by_sample(
    module: Any, query: Any, key: Any, value: Any, mask: Any, *, scaling: float, position_ids: Any, **_: Any
) -> tuple[Any, None]:
    """Causal attention of each packed sample by itself: on CPUs others build a mask of all tokens of a pack."""
    starts = (position_ids[0] == 0).nonzero().flatten().tolist()
    sizes = np.diff([*starts, query.shape[2]]).tolist()
    parts = zip(*(tensor.split(sizes, dim=2) for tensor in (query, key, value)), strict=True)
    done = [scaled_dot_product_attention(*part, is_causal=True, scale=scaling) for part in parts]
    return torch.cat(done, dim=2).transpose(1, 2).contiguous(), None


def tokens_of(lengths: Sequence[int]) -> list[list[int]]:
    """Tokens of each sample; no two samples begin alike."""
    generator = np.random.default_rng(1)
    return [[index + 1, *generator.integers(1, 128, length - 1).tolist()] for index, length in enumerate(lengths)]


def model_of() -> Any:
    transformers.AttentionInterface.register("by_sample", by_sample)
    transformers.AttentionMaskInterface.register("by_sample", lambda *_, **__: None)
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**MODEL))


def train(*, host: str, layout: str, order: str, lengths: Sequence[int]) -> dict[str, Any]:
    """Of this rank: lengths and CPU seconds of every micro-batch, and logged losses and gradient norms."""
    torch.set_num_threads(1)
    words = {f"<{number}>": number for number in range(128)}
    special = dict.fromkeys(("unk_token", "pad_token", "eos_token"), "<0>")
    level = models.WordLevel(words, unk_token=special["unk_token"])
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=Tokenizer(level), **special)
    data = Dataset.from_list([{"input_ids": row, "labels": row} for row in tokens_of(lengths)])
    with tempfile.TemporaryDirectory() as folder:
        settings = SETTINGS | {"output_dir": folder, "per_device_train_batch_size": 1 if order == "packing" else 4}
        settings |= {"train_sampling_strategy": order} if order in ("group_by_length", "batch_rebalance") else {}
        if host == "TRL":
            packing = {"packing": True, "max_length": 1536} if order == "packing" else {"max_length": None}
            config = SFTConfig(padding_free=True, **packing, **settings)
            trainer = SFTTrainer(model=model_of(), args=config, train_dataset=data, processing_class=tokenizer)
        else:
            collator = (
                transformers.DataCollatorForSeq2Seq(tokenizer)
                if layout == "padded"
                else transformers.DataCollatorWithFlattening()
            )
            arguments = transformers.TrainingArguments(**settings)
            trainer = transformers.Trainer(model=model_of(), args=arguments, train_dataset=data, data_collator=collator)
        if order == "ours":
            balance_trainer(trainer)
        batches: list[list[int]] = []
        seconds: list[float] = []
        collate, step = trainer.data_collator, trainer.training_step

        def note(features: Any) -> Any:
            firsts = list[int]()
            for row in features:  # a pack has several samples
                ends = np.cumsum(row.get("seq_lengths", [0]))
                firsts += [row["input_ids"][start] - 1 for start in (0, *ends[:-1])]
            batches.append(firsts)
            return collate(features)

        def timed(*args: Any, **keywords: Any) -> Any:
            start = time.thread_time()
            loss = step(*args, **keywords)
            seconds.append(time.thread_time() - start)
            return loss

        trainer.data_collator, trainer.training_step = note, timed
        trainer.train()
    logs = [(log["loss"], log["grad_norm"]) for log in trainer.state.log_history if "loss" in log]
    return {"ids": batches, "seconds": seconds, "logs": logs}


def figures_of_ranks(ranks: Sequence[Mapping[str, Any]], *, lengths: Sequence[int], layout: str) -> list[float]:
    """Slot by FLOPs and by CPU seconds, padding, largest, and what loss and gradient norm differ from those alone."""
    model = model_of()
    costs = CostModel.from_shape(ModelShape.from_hf_config(model.config.to_dict()))
    batches = [batch for batches in zip(*(rank["ids"] for rank in ranks), strict=True) for batch in batches]
    by_batch = [np.array(lengths)[batch] for batch in batches]
    by_flops = slot_figures(by_batch, model=costs, layout=layout, ranks=len(ranks))
    seconds = np.array([rank["seconds"] for rank in ranks])[:, 1:]  # the first pays for what is set up once
    ids, tokens = [sample for batch in batches[: 4 * len(ranks)] for sample in batch], tokens_of(lengths)
    labels, loss = sum(len(tokens[sample]) - 1 for sample in ids), 0.0
    for sample in ids:
        row = torch.tensor([tokens[sample]])
        part = cross_entropy(model(input_ids=row).logits[0, :-1], row[0, 1:], reduction="sum") / labels
        part.backward()
        loss += float(part.detach())
    norm = float(torch.stack([parameter.grad.norm() for parameter in model.parameters()]).norm())
    (logged, logged_norm) = ranks[0]["logs"][0]
    slot = float(seconds.max(axis=0).sum() * len(ranks) / seconds.sum())
    return [by_flops[0], slot, *by_flops[1:], abs(logged / loss - 1), abs(logged_norm / norm - 1)]


def section(figures: Mapping[str, Any]) -> str:
    names = list(SETS)
    plans = [
        [order, *(f"{cells[name][0]:.4f}, {cells[name][1]:.2f}, {cells[name][2]:.0f}" for name in names)]
        for order, cells in figures["plans"].items()
    ]
    trained = [[f"{cell:.4g}" if isinstance(cell, float) else cell for cell in row] for row in figures["trained"]]
    columns = "host | layout | order | slot, FLOPs | slot, CPU s | padding | largest | loss | gradient norm | lines"
    return f"""Plans of the hosts' real samplers, 8 ranks, Qwen3-8B FLOPs, 4,096 samples cut to {CAP:,} tokens, 256 a
step: slowest rank over mean in every micro-batch, tokens run over those of the samples, tokens of the largest
micro-batch. Micro-batches of a rank in a step: {", ".join(f"{name} {number}" for name, number in SETS.items())};
{figures["lengths"]}. The hosts' own have no cap, but for TRL's packing, which has as many as its packs.

{table(f"order | {' | '.join(names)}", plans)}

Trained on two CPU ranks: a Llama of 4 layers, 96 samples of code_files / 8, 32 a step in 4 micro-batches. CPU seconds
are of a thread, waiting excluded. Loss and gradient norm of the first step: what they differ from those of its samples
alone. Lines of user code.

{table(columns, trained, align="lll" + "r" * 7)}"""
