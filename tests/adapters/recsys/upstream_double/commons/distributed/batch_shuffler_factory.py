"""Shufflers by name."""

from typing import ClassVar

from commons.distributed.batch_shuffler import IdentityBalancedBatchShuffler


class BatchShufflerFactory:
    _registry: ClassVar = {"identity": IdentityBalancedBatchShuffler}

    @classmethod
    def register(cls, name, shuffler_class):
        if name in cls._registry:
            raise ValueError(name)
        cls._registry[name] = shuffler_class

    @classmethod
    def unregister(cls, name):
        del cls._registry[name]

    @classmethod
    def create(cls, name, **kwargs):
        return cls._registry[name](**kwargs)

    @classmethod
    def is_registered(cls, name):
        return name in cls._registry
