"""A loop whose CUDA is a double on the CPU: it records which thread pins, waits and times, and in which order.

It is for a world of its own: the double stays in place.
"""

import threading
from types import SimpleNamespace

import torch
import torch.distributed as dist
from loop_cases import Items, balanced, forward

from megatron_balance.mcore.telemetry import figures_of

KEYS = ("tokens", "labels", "loss_mask", "position_ids", "cu_seqlens", "max_seqlen")

DEVICE = 3
"""Of the training thread."""


class Device:
    """Stands for CUDA: it records, and marks the storages that were pinned."""

    def __init__(self):
        self.events = []
        self.training = threading.current_thread()
        device = self

        def pin_memory(tensor):
            device.note("pin")
            tensor.untyped_storage().is_of_device = True
            return tensor

        class Event:
            def __init__(self, enable_timing=False):
                self.timing = enable_timing

            def record(self, *_):
                device.note("event" if self.timing else "mark")

            def query(self):
                return True

            def elapsed_time(self, other):
                return 1.0 + dist.get_rank()

            def synchronize(self):
                device.note("wait")

        class Stream:
            def wait_event(self, event):
                device.note("follow")

        torch.cuda.is_available = lambda: True
        torch.cuda.get_device_name = lambda *_: "a double"
        torch.cuda.get_device_properties = lambda *_: SimpleNamespace(total_memory=2**36)
        torch.cuda.current_device = lambda: DEVICE
        torch.cuda.set_device = lambda index: device.note(f"device {index}")
        torch.cuda.Stream = Stream
        torch.cuda.current_stream = lambda *_: Stream()
        torch.cuda.set_stream = lambda stream: device.note("stream")
        torch.cuda.synchronize = lambda *_: device.note("wait")
        torch.cuda.Event = Event
        torch.Tensor.pin_memory = pin_memory

    def note(self, name):
        self.events.append((name, "training" if threading.current_thread() is self.training else "beside"))


class Noted(Items):
    """Items that note each pull."""

    def __init__(self, device):
        super().__init__(0)
        self.device, self.ahead = device, threading.Event()

    def __next__(self):
        self.device.note("pull")
        item = super().__next__()
        if threading.current_thread() is not self.device.training:
            self.ahead.set()
        return item


def steps_on_device(*, num_steps, overlap):
    """What happened in each step, and what each of its micro-batches was."""
    device = Device()
    items = Noted(device)
    packs = []

    def schedule(*, forward_step_func, data_iterator, model, num_microbatches, **_):
        if overlap and items.pulled > 2:  # the next step is prepared while this one runs: a loop without would hang
            assert items.ahead.wait(timeout=30), "the next step's items were not pulled while this one ran"
        for number in range(num_microbatches):
            forward(forward_step_func, data_iterator, model[0], number)

    def forward_step(data_iterator, model):
        device.note("forward")
        pack = next(data_iterator)
        pinned = {name: getattr(pack[name].untyped_storage(), "is_of_device", False) for name in KEYS}
        packs.append({name: [pinned[name], str(pack[name].dtype), pack[name].dim()] for name in KEYS})

    flags = () if overlap else ("--no-balance-overlap",)
    run = balanced(flags=flags, schedule=schedule, forward_step=forward_step, device="cuda", log_interval=1000)
    steps = []
    for _ in range(num_steps):
        items.ahead.clear()
        device.events = []
        run(items)
        steps.append(list(device.events))
    return steps, packs


def watched_steps(*, folder):
    """The figures of six steps; an evaluation comes after the second, and the fourth is run again.

    Each pass of a micro-batch takes this rank's number of milliseconds, counted from 1.
    """
    from megatron.core.pipeline_parallel import schedules

    Device()
    schedules.backward_step = lambda: None

    def schedule(*, forward_step_func, data_iterator, model, num_microbatches, **_):
        for number in range(num_microbatches):
            forward(forward_step_func, data_iterator, model[0], number)
            schedules.backward_step()

    flags = ("--balance-record", folder)
    run = balanced(
        flags=flags, schedule=schedule, forward_step=lambda data_iterator, _: next(data_iterator), device="cuda"
    )
    items, figures = Items(100 * dist.get_rank()), []
    for step in range(6):
        run(items)
        if step == 1:
            run(items, forward_only=True)
        if step == 3:
            run.ours._run._num_steps -= 1  # Megatron's own loop counts no step twice
            run(items)
        figures.append(figures_of(run.ours.last_step))
    run.ours.undo()
    return figures
