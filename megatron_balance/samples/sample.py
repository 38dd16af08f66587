"""A sample's tensors, the samples of a step in columns, and the schema that all samples of a run share.

A sample's lengths, of its tokens and of its ragged keys, and the schema determine the size and the place of all its
bytes, so that no sizes are sent with the samples.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from itertools import chain
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron_balance.errors import BalanceError

if TYPE_CHECKING:
    from megatron_balance.samples.shared_prefixes import HashChains

ALIGNMENT_NBYTES = 16  # complex128 is the widest dtype


def aligned(nbytes: int) -> int:
    """The next multiple of ALIGNMENT_NBYTES: torch views bytes as a dtype only from a multiple of its size on."""
    return -(-nbytes // ALIGNMENT_NBYTES) * ALIGNMENT_NBYTES


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
        """The inverse of `to_text`; BalanceError for a dtype that this torch does not have."""
        keys: list[KeySpec] = []
        for name, dtype_name, shape, kind in json.loads(text):
            dtype = getattr(torch, dtype_name.removeprefix("torch."), None)
            if not isinstance(dtype, torch.dtype):
                raise BalanceError(f"Key {name!r} has dtype {dtype_name!r}, which torch {torch.__version__} lacks.")
            keys.append(KeySpec(name, dtype=dtype, shape=tuple(shape), kind=kind))
        return SampleSchema(tuple(keys))


@dataclass(frozen=True, eq=False)
class Samples:
    """Samples in columns, key → its tensor of each sample: a few calls a key, however many there are.

    Attributes:
        schema: None only where there are none.
        columns: tensors `[original_seq_len, *trailing]` of a key that is per token (tokens, labels, loss_mask …), of
            any fixed shape where it is per sample, and `[num_entries, *trailing]` where it is ragged, with a number of
            entries of each sample's own: pixel_values `[num_patches, d]`, image_grid_thw `[num_images, 3]`.
        lengths: int64 `[num_samples]`, tokens (`original_seq_len`).
        values: int64 `[num_samples, k]`, numbers of each that every rank gets with its length; None for none.
        chains: hashes of what each begins with (`hash_chains`), which every rank gets as well; None for none.
    """

    schema: SampleSchema | None
    columns: Mapping[str, Sequence[Tensor]]
    lengths: NDArray[np.int64]
    values: NDArray[np.int64] | None = None
    chains: HashChains | None = None

    def __len__(self) -> int:
        return self.lengths.size

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
    def from_columns(
        columns: Mapping[str, Sequence[Tensor]], *, kinds: Mapping[str, Kind], lengths: NDArray[np.int64]
    ) -> Samples:
        """The samples of these columns, each of one dtype and shape; `kinds` has the kind of each key."""
        keys: list[KeySpec] = []
        for name, column in columns.items() if lengths.size else ():
            shape = column[0].shape[kinds[name] != "per_sample" :]
            keys.append(KeySpec(name, dtype=column[0].dtype, shape=tuple(shape), kind=kinds[name]))
        return Samples(SampleSchema(tuple(keys)) if lengths.size else None, columns, lengths)

    @staticmethod
    def joined(parts: Sequence[Samples]) -> Samples:
        """The samples of the items of a step; BalanceError names the key where schemas differ."""
        schemas = [(index, part.schema) for index, part in enumerate(parts) if part.schema is not None]
        first, schema = schemas[0] if schemas else (0, None)
        for index, other in schemas:
            if schema is not None and other != schema:
                difference = "; ".join(other.differences(schema))
                raise BalanceError(f"Item {index} differs from item {first} of the same rank: {difference}.")
        names = () if schema is None else [key.name for key in schema.keys]
        columns = {name: [*chain(*(part.columns[name] for part in parts if len(part)))] for name in names}
        return Samples(schema, columns, np.concatenate([np.zeros(0, np.int64), *(part.lengths for part in parts)]))
