"""The base class of the shufflers; what it does upstream is not what is tested."""

from concurrent.futures import ThreadPoolExecutor


class BaseTaskBalancedBatchShuffler:
    def __init__(self):
        self._kk_executor = ThreadPoolExecutor(max_workers=1)

    def get_workloads(self, batch, *args, **kwargs):
        raise NotImplementedError

    def shuffle(
        self, batch, pg_group=None, return_indices=False, return_workloads=False, use_all2all=False, *args, **kwargs
    ):
        raise NotImplementedError("upstream's shuffle")

    def start_shuffle_async(self, batch, pg_group=None, *args, **kwargs):
        raise NotImplementedError("upstream's start_shuffle_async")

    def finish_shuffle(self, batch, handle, pg_group=None, use_all2all=False):
        raise NotImplementedError("upstream's finish_shuffle")


class IdentityBalancedBatchShuffler(BaseTaskBalancedBatchShuffler):
    def get_workloads(self, batch, *args, **kwargs):
        return 0

    def shuffle(self, batch, *args, **kwargs):
        return batch
