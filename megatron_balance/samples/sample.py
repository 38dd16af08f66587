"""A sample's tensors, the samples of a step in columns, and the schema that all samples of a run share.

A sample's lengths, of its tokens and of its ragged keys, and the schema determine the size and the place of all its
bytes, so that no sizes are sent with the samples.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from itertools import chain
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron_balance.errors import BalanceError

ALIGNMENT_NBYTES = 16  # complex128 is the widest dtype


def aligned(nbytes: int) -> int:
    """The next multiple of ALIGNMENT_NBYTES: torch views bytes as a dtype only from a multiple of its size on."""
    return -(-nbytes // ALIGNMENT_NBYTES) * ALIGNMENT_NBYTES


@dataclass(frozen=True, eq=False)
class Sample:
    """One sequence of tokens, with all its tensors.

    Attributes:
        per_token: tensors `[original_seq_len, *trailing]`: tokens, labels, loss_mask, position_ids and whatever else
            has one entry a token.
        per_sample: tensors of any fixed shape, 0-d included: one entry a sample.
        ragged: tensors `[num_entries, *trailing]` whose number of entries is a key's and a sample's own: pixel_values
            `[num_patches, d]`, image_grid_thw `[num_images, 3]`. All samples of a run have the same keys; one without
            an image has `[0, d]`.

    Raises:
        BalanceError: no per-token tensor, or two of different lengths.
    """

    per_token: Mapping[str, Tensor]
    _: KW_ONLY
    per_sample: Mapping[str, Tensor] = field(default_factory=dict)
    ragged: Mapping[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.per_token:
            raise BalanceError("A Sample needs at least one per-token tensor: its length is read from there.")
        for name, tensor in self.per_token.items():
            if len(tensor) != self.length:
                raise BalanceError(
                    f"Sample.per_token[{name!r}] has {len(tensor)} tokens and {next(iter(self.per_token))!r} has "
                    f"{self.length}: all must have the same length."
                )

    @property
    def length(self) -> int:
        """Tokens (`original_seq_len`)."""
        return len(next(iter(self.per_token.values())))


Kind = Literal["per_token", "per_sample", "ragged"]
KINDS: tuple[Kind, ...] = ("per_token", "per_sample", "ragged")


def lengths_key(name: str) -> str:
    """The key of a batch that holds the lengths of a ragged key: `pixel_values_lengths`."""
    return f"{name}_lengths"


@dataclass(frozen=True)
class KeySpec:
    """Dtype and shape of one key, the same for every sample.

    The shape is the trailing one of a per-token or a ragged key, and the whole one of a per-sample key.
    """

    name: str
    _: KW_ONLY
    dtype: torch.dtype
    shape: tuple[int, ...] = ()
    kind: Kind = "per_token"

    @property
    def nbytes(self) -> int:
        """Bytes of one entry: a token's, a sample's, or one of a ragged key."""
        return self.dtype.itemsize * math.prod(self.shape)

    def __str__(self) -> str:
        first = {"per_token": ["original_seq_len"], "ragged": ["num_entries"], "per_sample": []}[self.kind]
        return f"{str(self.dtype).removeprefix('torch.')} [{', '.join([*first, *map(str, self.shape)])}]"


@dataclass(frozen=True)
class SampleSchema:
    """Keys, dtypes and shapes that all samples of a run share.

    Attributes:
        keys: in canonical order, whatever order they were given in: per-token keys by name, then per-sample keys, then
            ragged ones.
    """

    keys: tuple[KeySpec, ...]

    def __post_init__(self) -> None:
        in_order = sorted(self.keys, key=lambda key: (KINDS.index(key.kind), key.name))
        object.__setattr__(self, "keys", tuple(in_order))

    @property
    def num_ragged(self) -> int:
        """Ragged keys."""
        return sum(key.kind == "ragged" for key in self.keys)

    @staticmethod
    def of(sample: Sample) -> SampleSchema:
        """The schema of one sample."""
        keys: list[KeySpec] = []
        for kind in KINDS:
            for name, tensor in getattr(sample, kind).items():
                shape = tensor.shape if kind == "per_sample" else tensor.shape[1:]
                keys.append(KeySpec(name, dtype=tensor.dtype, shape=tuple(shape), kind=kind))
        return SampleSchema(tuple(keys))

    @staticmethod
    def shared_by(schemas: Iterable[SampleSchema | None], *, kind: str = "sample") -> SampleSchema | None:
        """The one schema of all samples of a rank, or of another kind of its parts; None where there are none.

        Raises:
            BalanceError: two of them differ; the message names the key.
        """
        numbered = ((index, schema) for index, schema in enumerate(schemas) if schema is not None)
        first, shared = next(numbered, (0, None))
        for index, schema in numbered:
            if shared is not None and schema != shared:
                difference = "; ".join(schema.differences(shared))
                raise BalanceError(
                    f"{kind.capitalize()} {index} differs from {kind} {first} of the same rank: {difference}."
                )
        return shared

    def differences(self, reference: SampleSchema) -> Iterator[str]:
        """Differences of this schema from a reference, a phrase for each key."""
        keys, reference_keys = ({key.name: key for key in schema.keys} for schema in (self, reference))
        for name in sorted(keys.keys() | reference_keys.keys()):
            if keys.get(name) != reference_keys.get(name):
                expected = reference_keys.get(name, "no such key")
                yield f"{name!r} is {keys.get(name, 'missing')} where the other has {expected}"

    def to_text(self) -> str:
        """JSON, so that a peer's text is read and never executed."""
        return json.dumps([[key.name, str(key.dtype), key.shape, key.kind] for key in self.keys])

    @staticmethod
    def from_text(text: str) -> SampleSchema:
        """The inverse of `to_text`.

        Raises:
            BalanceError: a dtype that this torch does not have.
        """
        keys: list[KeySpec] = []
        for name, dtype_name, shape, kind in json.loads(text):
            dtype = getattr(torch, dtype_name.removeprefix("torch."), None)
            if not isinstance(dtype, torch.dtype):
                raise BalanceError(f"Key {name!r} has dtype {dtype_name!r}, which torch {torch.__version__} lacks.")
            keys.append(KeySpec(name, dtype=dtype, shape=tuple(shape), kind=kind))
        return SampleSchema(tuple(keys))


@dataclass(frozen=True, eq=False)
class Samples:
    """The samples of a step in columns, key → its tensor of each sample: a few calls a key, however many there are.

    `schema` is None only where there are none; `lengths` are int64 `[num_samples]`, tokens; `values`, int64
    `[num_samples, k]`, are numbers of each that every rank gets with its length; None for none.
    """

    schema: SampleSchema | None
    columns: Mapping[str, Sequence[Tensor]]
    lengths: NDArray[np.int64]
    values: NDArray[np.int64] | None = None

    def __len__(self) -> int:
        return self.lengths.size

    def __iter__(self) -> Iterator[Sample]:
        return map(self.__getitem__, range(len(self)))

    def __getitem__(self, index: int) -> Sample:
        kinds: dict[str, dict[str, Tensor]] = {kind: {} for kind in KINDS}
        for key in self.schema.keys if self.schema is not None else ():
            kinds[key.kind][key.name] = self.columns[key.name][index]
        return Sample(kinds["per_token"], per_sample=kinds["per_sample"], ragged=kinds["ragged"])

    @property
    def ragged_lengths(self) -> NDArray[np.int64]:
        """int64 `[num_samples, num_ragged]`, entries of each ragged key, in the schema's order."""
        keys = () if self.schema is None else self.schema.keys
        counts = [[len(entries) for entries in self.columns[key.name]] for key in keys if key.kind == "ragged"]
        return np.array(counts, dtype=np.int64).reshape(len(counts), len(self)).T

    def select(self, indices: NDArray[np.int64]) -> Samples:
        """Those at these indices, in their order."""
        order: list[int] = indices.tolist()
        columns = {name: [column[index] for index in order] for name, column in self.columns.items()}
        return Samples(self.schema, columns, self.lengths[indices])

    @staticmethod
    def of(samples: Sequence[Sample] | Samples) -> Samples:
        """The columns of samples; BalanceError where two differ."""
        if isinstance(samples, Samples):
            return samples
        schema = SampleSchema.shared_by(map(SampleSchema.of, samples))
        keys = () if schema is None else schema.keys
        columns = {key.name: [getattr(sample, key.kind)[key.name] for sample in samples] for key in keys}
        return Samples(schema, columns, np.array([sample.length for sample in samples], dtype=np.int64))

    @staticmethod
    def joined(parts: Sequence[Samples]) -> Samples:
        """The samples of all parts; BalanceError where schemas differ."""
        schema = SampleSchema.shared_by((part.schema for part in parts), kind="item")
        names = () if schema is None else [key.name for key in schema.keys]
        columns = {name: [*chain(*(part.columns[name] for part in parts if len(part)))] for name in names}
        return Samples(schema, columns, np.concatenate([np.zeros(0, np.int64), *(part.lengths for part in parts)]))
