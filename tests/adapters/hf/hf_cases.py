"""Training by Trainer, TRL and Accelerate on gloo ranks, and what one rank computes sample by sample.

The learning rate is 0: every step has the weights of the first, so that its loss and gradient can be computed alone.
"""

import tempfile
import warnings

import numpy as np
import torch
import torch.distributed as dist
from accelerate import Accelerator
from datasets import Dataset
from tokenizers import Tokenizer, models
from tokenizers.pre_tokenizers import WhitespaceSplit
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader
from transformers import (
    DataCollatorForSeq2Seq,
    DataCollatorWithFlattening,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from trl import SFTConfig, SFTTrainer

from megatron_balance.loaders import BalancedBatchSampler, balance_trainer

VOCABULARY = 64
LENGTHS = np.clip(np.random.default_rng(3).lognormal(3.5, 0.9, 64), 4, 200).astype(int)


def samples():
    """Tokens of each."""
    generator = np.random.default_rng(1)
    return [generator.integers(1, VOCABULARY, length).tolist() for length in LENGTHS]


def _model():
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, **sizes, max_position_embeddings=256))


def _tokenizer():
    words = models.WordLevel({f"<{number}>": number for number in range(VOCABULARY)}, unk_token="<0>")
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words), pad_token="<0>", eos_token="<0>")


def write_model(folder):
    """A small model and its tokenizer, with a template of chats, in a folder."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    Qwen3ForCausalLM(Qwen3Config(vocab_size=VOCABULARY, head_dim=16, **sizes, num_key_value_heads=2)).save_pretrained(
        folder
    )
    tokenizer = _tokenizer()
    tokenizer.backend_tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    tokenizer.save_pretrained(folder)


def alone(positions):
    """Loss per label and gradient norm of these samples, each by itself."""
    model, tokens = _model(), samples()
    labels = sum(len(tokens[position]) - 1 for position in positions)
    total = 0.0
    for position in positions:
        row = torch.tensor([tokens[position]])
        logits = model(input_ids=row).logits[0, :-1]
        loss = torch.nn.functional.cross_entropy(logits, row[0, 1:], reduction="sum") / labels
        loss.backward()
        total += float(loss.detach())
    return total, float(torch.stack([parameter.grad.norm() for parameter in model.parameters()]).norm())


class _Stop(TrainerCallback):
    """Ends training after a step, as a killed run would after its checkpoint."""

    def __init__(self, step):
        self._step = step

    def on_step_end(self, args, state, control, **_):
        control.should_training_stop = state.global_step >= self._step


def _trainer(kind, folder, **settings):
    settings = {
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "num_train_epochs": 2,
        "learning_rate": 0.0,
        "logging_steps": 1,
        "max_grad_norm": 1e9,
        "save_steps": 1,
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "seed": 11,
        **settings,
    }
    data = Dataset.from_list([{"input_ids": row, "labels": row} for row in samples()])
    if kind.startswith("trl"):
        args = SFTConfig(folder, padding_free=kind == "trl packed", max_length=None, bf16=False, **settings)
        return SFTTrainer(model=_model(), args=args, train_dataset=data, processing_class=_tokenizer())
    collator = DataCollatorForSeq2Seq(_tokenizer()) if kind == "padded" else DataCollatorWithFlattening()
    return Trainer(
        model=_model(), args=TrainingArguments(folder, **settings), train_dataset=data, data_collator=collator
    )


def train(kind, *, stop=0, options, settings):
    """Logged losses and gradient norms, and this rank's micro-batches; stopped and resumed after a step."""
    with tempfile.TemporaryDirectory() as folder:
        names = [folder]
        dist.broadcast_object_list(names)
        runs = [stop, 0] if stop else [0]
        for index, last in enumerate(runs):
            trainer = _trainer(kind, names[0], **settings)
            sampler = balance_trainer(trainer, **options)
            batches = []
            collate = trainer.data_collator

            class Noted(type(collate)):
                """Notes the lengths of each micro-batch."""

                def __call__(self, features, *args, **keywords):
                    batches.append(sorted(len(row["input_ids"]) for row in features))  # noqa: B023 - of this run
                    return super().__call__(features, *args, **keywords)

            collate.__class__ = Noted
            if last:
                trainer.add_callback(_Stop(last))
            trainer.train(resume_from_checkpoint=index > 0)
            dist.barrier()
        logs = [log for log in trainer.state.log_history if "loss" in log]
        expected = []
        for epoch in range(2):
            for step in range(sampler.num_steps):
                expected.append([position for rank in sampler.plan(epoch, step) for slot in rank for position in slot])
        return {
            "logs": [(log["loss"], log["grad_norm"]) for log in logs],
            "batches": batches,
            "steps": expected,
            "lines": [[sorted(LENGTHS[slot].tolist()) for slot in _own(sampler, epoch)] for epoch in range(2)],
        }


def _own(sampler, epoch):
    for step in range(sampler.num_steps):
        yield from sampler.plan(epoch, step)[sampler.rank]


def warned():
    """What is said of a Trainer whose model's forward takes no keywords for its loss."""
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = _trainer("flattened", folder)
        trainer.model_accepts_loss_kwargs = False
        balance_trainer(trainer)
    return [str(warning.message) for warning in caught]


def accelerate(num_workers):
    """This rank's micro-batches of two epochs through `prepare`, the rest of each after three, and its sampler's."""
    accelerator = Accelerator(cpu=True)
    sampler = BalancedBatchSampler(LENGTHS, global_batch_size=16, num_microbatches=2, max_tokens=1000)
    loader = DataLoader(range(64), batch_sampler=sampler.all_ranks(), collate_fn=list, num_workers=num_workers)
    loader = accelerator.prepare(loader)
    epochs, rests = [], []
    for epoch in range(2):
        loader.set_epoch(epoch)
        epochs.append(list(loader))
        loader.set_epoch(epoch)  # listing an epoch counts it
        rests.append(list(accelerator.skip_first_batches(loader, 3)))
    planned = [[list(slot) for slot in _own(sampler, epoch)] for epoch in range(2)]
    return {"given": epochs, "rests": rests, "planned": planned}


def stateful(num_workers, given_before, epoch):
    """The rest of an epoch after so many micro-batches, from a state, and without a stop."""

    def loader():
        sampler = BalancedBatchSampler(LENGTHS, global_batch_size=16, num_microbatches=2)
        sampler.set_epoch(epoch)
        return sampler, StatefulDataLoader(
            list(range(64)), batch_sampler=sampler, collate_fn=list, num_workers=num_workers
        )

    _, first = loader()
    iterator = iter(first)
    for _ in range(given_before):
        next(iterator)
    state = first.state_dict()
    rest = list(iterator)
    _, second = loader()
    second.load_state_dict(state)
    return {"rest": rest, "resumed": list(second)}
