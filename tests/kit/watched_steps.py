"""Trains with pretrain_sft, watched from outside: the main program of each rank of the tests' training runs.

The first argument is the folder of the run; each rank writes rankN.jsonl there, a line an event, at once: `step` (its
numbers, and the micro-batches that the forward step read, samples known by their first token), `evaluation`, `counted`
(for FLOP/s), `logged` (what reaches the TensorBoard writer), and `end` or `error`. All lines hold how often each data
loader was asked for an item, and the shapes that pipeline stages sent, so far.

Only Megatron's functions and the script's are wrapped: none of the package. TRAINING_STAND_INS in the environment
lists functions, as `[["MODULE:NAME", KEYWORDS], ...]`, that are called before training, on some ranks where KEYWORDS
name `ranks`; `stand_ins.py` has some.
"""

import functools
import importlib
import json
import os
import sys
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

STAND_INS = "TRAINING_STAND_INS"
_HELD = {"threads": "task", "files": "fd"}
Function = Callable[..., Any]


class Watch:
    """Writes the lines of this rank."""

    def __init__(self, out):
        self._out = out
        self.chunks = {}  # what each model chunk has read since the last line
        self.reads = Counter()  # calls of each split's loader
        self.before_step = []  # called with its number, from 1
        self.num_steps = 0
        self.numbers = {}  # written since the last line of `logged`

    def write(self, kind, **columns):
        """A line of a kind."""
        row = {"kind": kind, **columns, "reads": dict(self.reads)}
        print(json.dumps(row), file=self._out, flush=True)

    def microbatches(self):
        """Those of the first chunk that ran; every chunk of a virtual pipeline reads the same."""
        every = list(self.chunks.values()) or [[]]
        assert all(chunk == every[0] for chunk in every), "model chunks read different micro-batches"
        return every[0]

    def install(self):
        """Wrap Megatron's functions and the script's."""
        import pretrain_sft
        from megatron.training import training
        from torch.utils.data.dataloader import _BaseDataLoaderIter

        _wrap(training, "train_step", self._step)
        _wrap(training, "evaluate", self._evaluation)
        _wrap(training, "training_log", self._log)
        _wrap(pretrain_sft, "forward_step", self._forward)
        _wrap(_BaseDataLoaderIter, "__next__", self._read)
        if hasattr(training, "consume_seqlen_stats_in_iteration"):  # from 0.18
            _wrap(training, "consume_seqlen_stats_in_iteration", self._counted)

    def _step(self, train_step, *positional, **keywords):
        self.num_steps += 1
        _own_writer(self.numbers)
        for act in self.before_step:
            act(self.num_steps)
        self.chunks.clear()
        before = _shape_settings()
        result = train_step(*positional, **keywords)
        losses, grad_norm = result[0], result[5]
        row = {name.replace(" ", "_"): float(value) for name, value in losses.items()}
        row["grad_norm"] = None if grad_norm is None else float(grad_norm)
        settings = [before, _shape_settings()]
        row |= {f"num_{name}": len(os.listdir(f"/proc/self/{where}")) for name, where in _HELD.items()}
        self.write("step", **row, **_place(), microbatches=self.microbatches(), settings=settings)
        return result

    def _evaluation(self, evaluate, *positional, **keywords):
        from megatron.training import get_args

        self.chunks.clear()
        before = get_args().consumed_valid_samples
        result = evaluate(*positional, **keywords)
        losses = {name: float(value) for name, value in result[0].items()}
        consumed = get_args().consumed_valid_samples - before
        self.write("evaluation", losses=losses, consumed=consumed, **_place(), microbatches=self.microbatches())
        return result

    def _forward(self, forward_step, data_iterator, model, *rest, **keywords):
        seen = self.chunks.setdefault(id(model), [])
        iterator = None if data_iterator is None else _noted(data_iterator, seen)
        return forward_step(iterator, model, *rest, **keywords)

    def _read(self, stock, loader):
        self.reads[loader._dataset.split.name] += 1
        return stock(loader)

    def _log(self, training_log, *positional, **keywords):
        result = training_log(*positional, **keywords)
        self.write("logged", numbers=self.numbers)
        self.numbers.clear()
        return result

    def _counted(self, consume):
        counted = consume()
        self.write("counted", tokens=counted[0], squares=counted[1])
        return counted


def main():
    """Watch while the script trains."""
    import pretrain_sft

    folder = Path(sys.argv.pop(1))
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"rank{os.environ['RANK']}.jsonl").open("w") as out:
        watch = Watch(out)
        for name, keywords in json.loads(os.environ.get(STAND_INS, "[]")):
            module, function = name.split(":")
            if int(os.environ["RANK"]) in keywords.pop("ranks", [int(os.environ["RANK"])]):
                getattr(importlib.import_module(module), function)(watch, **keywords)
        watch.install()
        try:
            pretrain_sft.main()
        except BaseException as error:
            if not isinstance(error, SystemExit) or error.code not in (0, None):
                watch.write("error", text="".join(traceback.format_exception_only(error)))
                raise
        watch.write("end")


def _wrap(owner, name, watched):
    stock = getattr(owner, name)
    setattr(owner, name, functools.wraps(stock)(lambda *given, **named: watched(stock, *given, **named)))


def _own_writer(numbers):
    """Give Megatron a TensorBoard writer on the rank that has one, unless `--tensorboard-dir` does."""
    from megatron.training import global_vars

    class Writer:
        def add_scalar(self, name, value, *_, **__):
            numbers[name] = float(value)

        def __getattr__(self, name):
            return lambda *positional, **keywords: None

    if global_vars._GLOBAL_TENSORBOARD_WRITER is None and int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1:
        global_vars._GLOBAL_TENSORBOARD_WRITER = Writer()


def _noted(data_iterator, seen):
    """The iterator, with what it hands out noted."""
    from megatron.core import parallel_state

    while (item := next(data_iterator, None)) is not None:  # Megatron's iterators have no __iter__
        note = {"cp_size": parallel_state.get_context_parallel_world_size()}
        if "tokens" in item:  # not on a pipeline stage that loads no data
            note |= {"tokens": item["tokens"].numel(), "lengths": [], "samples": [], "dummies": []}
            width = item["tokens"].shape[-1]
            starts_of = item.get("cu_seqlens_padded", item.get("cu_seqlens"))
            for row in range(len(item["tokens"])):
                first = (item["position_ids"][row] == 0).nonzero().flatten().tolist()  # padded rows have no starts
                starts = [*first, width] if starts_of is None else starts_of[row].unique().tolist()
                for start, end in zip(starts[:-1], starts[1:], strict=True):
                    if item["loss_mask"][row, start:end].any():  # else filler or a dummy
                        note["samples"].append(int(item["tokens"][row, start]))
                        note["lengths"].append(int(item["loss_mask"][row, start:end].nonzero().max()) + 1)
                    elif not item["loss_mask"].any():
                        note["dummies"].append(end - start)
        seen.append(note)
        yield item


def _place():
    """Of this rank in the layout."""
    from megatron.core import parallel_state

    return {
        "dp_rank": parallel_state.get_data_parallel_rank(),
        "cp_rank": parallel_state.get_context_parallel_rank(),
        "tp_rank": parallel_state.get_tensor_model_parallel_rank(),
        "stage": parallel_state.get_pipeline_model_parallel_rank(),
    }


def _shape_settings():
    from megatron.core import parallel_state
    from megatron.training import get_args

    args = get_args()
    ours = [args.seq_length, args.micro_batch_size, args.context_parallel_size]
    return [*ours, parallel_state.get_context_parallel_world_size()]


if __name__ == "__main__":
    main()
