"""The rows of stock that `compare` counts are those of Megatron's own data sets, on the same lengths, with its seed."""

import json

import numpy as np
import pytest

from megatron_balance import CostModel
from megatron_balance.lengths import MEGATRON_SEED, filled_rows, joined_rows, read_lengths, read_rows
from megatron_balance.planner import Problem
from megatron_balance.record import StepRecord
from megatron_balance.topology import Limits, Topology

torch = pytest.importorskip("torch")
gpt_dataset = pytest.importorskip("megatron.core.datasets.gpt_dataset")
indexed_dataset = pytest.importorskip("megatron.core.datasets.indexed_dataset")
sft_dataset = pytest.importorskip("megatron.training.datasets.sft_dataset")
Split = pytest.importorskip("megatron.core.datasets.utils").Split

SEQ_LENGTH = 512
EOD, PAD = 1, 0
LENGTHS = np.clip(np.random.default_rng(3).lognormal(5, 1.2, 1200).astype(np.int64), 2, 3000)


class Tokenizer:
    """Counts: a conversation is as many tokens as its text says."""

    eod, pad, vocab_size = EOD, PAD, 1000

    @property
    def unique_identifiers(self):
        return {"class": "a test's"}

    def tokenize_conversation(self, conversation, return_target, add_generation_prompt):
        tokens = np.full(int(conversation[0]["content"]), 7)
        tokens[-1] = EOD
        return torch.tensor(tokens), torch.tensor(tokens)


def config(**changes):
    names = ("reset_position_ids", "reset_attention_mask", "eod_mask_loss")
    sizes = {"random_seed": MEGATRON_SEED, "sequence_length": SEQ_LENGTH, "tokenizer": Tokenizer()}
    data = {"blend": None, "split": "1,0,0", "create_attention_mask": False}
    return gpt_dataset.GPTDatasetConfig(**sizes, **data, **dict.fromkeys(names, False), **changes)


def figures(rows):
    """Rows, tokens, padding and the sum of squared sequences of an epoch, of real tokens and sequences of each row."""
    tokens = sum(sum(sequences) for _, sequences in rows)
    squares = sum(int(length) ** 2 for _, sequences in rows for length in sequences)
    return np.array([len(rows), tokens, tokens - sum(real for real, _ in rows), squares])


def predicted(stock, *, cp_size=1):
    """The same by the step that `compare` judges as stock."""
    rows = np.repeat(np.arange(stock.counts.size), stock.counts)
    shared = {
        "cost_model": CostModel(quadratic=1),
        "topology": Topology(1, cp_size=cp_size),
        "limits": Limits(SEQ_LENGTH),
    }
    problem = Problem.of(stock.lengths, home_ranks=np.zeros_like(rows), **shared)
    plan = {"microbatch_of": np.zeros_like(rows), "cp_size_grid": np.full((1, 1), cp_size)}
    step = StepRecord(**vars(problem), **plan, iteration=1, rows=rows, row_tokens=stock.row_tokens).stock()
    assert step.num_segments is not None
    parts = np.split(step.segments, np.cumsum(step.num_segments)[:-1])
    return figures([(int(real), part.tolist()) for real, part in zip(step.lengths, parts, strict=True)])


@pytest.mark.parametrize("masked", [False, True], ids=["documents", "masked-documents"])
def test_joined_documents_are_those_of_gptdataset(tmp_path, masked):
    builder = indexed_dataset.IndexedDatasetBuilder(str(tmp_path / "corpus.bin"), dtype=np.uint16)
    for length in LENGTHS:
        builder.add_document(torch.full((int(length),), 7), [int(length)])
    builder.finalize(str(tmp_path / "corpus.idx"))
    low = indexed_dataset.IndexedDataset(str(tmp_path / "corpus"))
    settings = config(inter_document_masking=masked, path_to_cache=str(tmp_path / "cache"))
    dataset = gpt_dataset.GPTDataset(
        low, str(tmp_path / "corpus"), np.arange(LENGTHS.size), None, Split.train, settings
    )
    rows = []
    for row in range(len(dataset)):
        entry = dataset[row]
        real = int((entry["tokens"] == 7).sum())
        sequences = torch.unique_consecutive(entry["cu_seqlens"]).diff().tolist() if masked else [len(entry["tokens"])]
        rows.append((real, sequences))
    documents, options = read_lengths(tmp_path / "corpus"), {"seq_length": SEQ_LENGTH, "seed": MEGATRON_SEED}
    balanced = joined_rows(documents, limit=10**6, is_masked=masked, **options)
    assert predicted(balanced) == pytest.approx(figures(rows), rel=1e-9)
    if masked:  # the rows themselves, in the order of training
        first = joined_rows(documents, limit=3, is_masked=True, **options)
        assert first.lengths.tolist() == [length for _, sequences in rows[:3] for length in sequences]


@pytest.mark.parametrize("limit", [1, 5], ids=["padded", "packed"])
@pytest.mark.parametrize("cp_size", [1, 2])
def test_filled_rows_are_those_of_sftdataset(tmp_path, limit, cp_size):
    rng = np.random.default_rng(4)
    counts = rng.integers(1, limit, 200, endpoint=True)
    lengths = LENGTHS[: counts.sum()] if limit == 1 else np.clip(LENGTHS[: counts.sum()], 2, 300)
    row_lengths = [part.tolist() for part in np.split(lengths, np.cumsum(counts)[:-1])]
    low = [[{"role": "system", "content": str(length)} for length in row] for row in row_lengths]
    settings = config(context_parallel_size=cp_size)
    dataset = sft_dataset.SFTDataset(low, None, np.arange(len(low)), len(low), Split.train, settings)
    rows = []
    for row in range(len(dataset)):
        entry = dataset[row]
        rows.append(
            (int((entry["tokens"] != PAD).sum()), torch.unique_consecutive(entry["cu_seqlens"]).diff().tolist())
        )
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row if limit > 1 else row[0]) + "\n" for row in row_lengths))
    balanced = filled_rows(read_rows(file), seq_length=SEQ_LENGTH, multiple=2 * cp_size if cp_size > 1 else 1)
    assert predicted(balanced, cp_size=cp_size) == pytest.approx(figures(rows), rel=1e-9)
    assert balanced.num_cut == sum(sum(row) > SEQ_LENGTH for row in row_lengths) > 0
