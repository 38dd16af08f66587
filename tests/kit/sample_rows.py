"""Samples one by one, as tests write and compare them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from megatron_balance.samples.sample import KINDS, Samples


@dataclass(frozen=True, eq=False)
class Sample:
    """The tensors of one sample, by kind and key."""

    per_token: Mapping[str, Tensor]
    per_sample: Mapping[str, Tensor] = field(default_factory=dict)
    ragged: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def length(self):
        """Tokens."""
        return len(next(iter(self.per_token.values())))

    @property
    def tensors(self):
        """All tensors by key."""
        return {**self.per_token, **self.per_sample, **self.ragged}


def samples_of(rows, *, schema=None):
    """The columns of samples of one schema; a schema where there may be none."""
    lengths = np.array([row.length for row in rows], dtype=np.int64)
    kinds = {name: kind for kind in KINDS for row in rows[:1] for name in getattr(row, kind)}
    columns = {name: [row.tensors[name] for row in rows] for name in kinds}
    return Samples.from_columns(columns, kinds=kinds, lengths=lengths) if rows else Samples(schema, {}, lengths)


def schema_of(row):
    """The schema of one sample."""
    schema = samples_of([row]).schema
    assert schema is not None
    return schema


def rows_of(samples):
    """The inverse of `samples_of`."""
    keys = samples.schema.keys if samples.schema else ()
    return [
        Sample(*({key.name: samples.columns[key.name][index] for key in keys if key.kind == kind} for kind in KINDS))
        for index in range(len(samples))
    ]
