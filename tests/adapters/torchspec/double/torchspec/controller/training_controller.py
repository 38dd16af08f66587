import functools
import threading
from collections import deque
from dataclasses import dataclass
from queue import Queue
from random import Random
from types import SimpleNamespace


@dataclass
class InferenceOutput:
    data_id: str
    mooncake_key: str
    tensor_shapes: dict | None


def traced(method):
    @functools.wraps(method)
    def wrapper(*positional, **keywords):
        return method(*positional, **keywords)

    return wrapper


def as_actor(plain):
    """The result of Ray's decorator: an object that keeps a subclass, whose methods are wrapped ones of its own."""

    class Modified(plain):
        __ray_actor_class__ = plain

    for name, method in vars(plain).items():
        if callable(method) and not name.startswith("__"):
            setattr(Modified, name, traced(method))
    metadata = SimpleNamespace(modified_class=Modified, last_export_cluster_and_job=None)

    def remote(*positional, **keywords):
        metadata.last_export_cluster_and_job = ("cluster", "job")
        return Modified(*positional, **keywords)

    return SimpleNamespace(__ray_metadata__=metadata, remote=remote)


@as_actor
class AsyncTrainingController:
    def __init__(self, args, dp_size):
        self.args = args
        self.dp_size = dp_size
        self.dispatch_batch_size = args.per_dp_rank_batch_size * dp_size
        self.batch_id = 0
        self.prompt_buffer = deque()
        self.sample_pool = deque()
        self._pool_lock = threading.Lock()
        self._pool_bytes = 0
        self._sample_bytes = {}
        self._inference_error = None
        self.eval_pool = deque()
        self.train_queues = [Queue() for _ in range(dp_size)]
        self.eval_queues = [Queue() for _ in range(dp_size)]
        self._stored_dataset = []
        self._dataset_seed = 42
        self._dataset_epoch = 0

    def _prepare_dataset(self, skip: int = 0):
        samples = list(self._stored_dataset)
        Random(self._dataset_seed + self._dataset_epoch).shuffle(samples)
        return samples[skip:]

    def get_prompt_buffer_size(self):
        return len(self.prompt_buffer)

    def push_inference_results(self, results):
        with self._pool_lock:
            for result in results:
                size = 2 * (result.tensor_shapes or {}).get("input_ids", (0,))[-1]
                self._sample_bytes[result.mooncake_key] = size
                self._pool_bytes += size
                self.sample_pool.append(result)
            return self._pool_bytes

    def get_pool_size(self):
        return len(self.sample_pool) + len(self.eval_pool)

    def try_dispatch_batch(self):
        if self._inference_error is not None:
            raise RuntimeError(self._inference_error)
        with self._pool_lock:
            if len(self.sample_pool) < self.dispatch_batch_size:
                return False
            batch = [self.sample_pool.popleft() for _ in range(self.dispatch_batch_size)]
            for result in batch:
                self._pool_bytes -= self._sample_bytes.pop(result.mooncake_key)
        self._dispatch_to_queues(batch, self.train_queues)
        self.batch_id += 1
        return True

    def try_dispatch_eval_batch(self):
        if len(self.eval_pool) < self.dp_size:
            return False
        self._dispatch_to_queues([self.eval_pool.popleft() for _ in range(self.dp_size)], self.eval_queues)
        return True

    def _partition_results(self, results):
        return [results[rank :: self.dp_size] for rank in range(self.dp_size)]

    def _dispatch_to_queues(self, batch_results, queues):
        for rank, results in enumerate(self._partition_results(batch_results)):
            for result in results:
                queues[rank].put(result)

    def get_status(self):
        return {"sample_pool_size": len(self.sample_pool), "batches_dispatched": self.batch_id}
