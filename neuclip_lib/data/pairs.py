"""Image-text pairs that training and evaluation read: the face they share, and the kind held in memory."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


class Pairs(ABC):
    """n image-text pairs of one split.

    Attributes:
        name: of the set.
        split: that was asked for.
        image_size: side in pixels.
        index: int64 [n], the sample's stable place within the whole set.
        group: int64 [n], equal numbers for one concept; every caption of it is right for every image of it.
        content_hash: of the whole set (pictures and texts), the same on every machine that built it alike.
    """

    name: str
    split: str
    image_size: int
    index: Tensor
    group: Tensor
    content_hash: str

    def __len__(self) -> int:
        return len(self.index)

    @abstractmethod
    def images_at(self, i: Tensor) -> Tensor:
        """Pictures at places ``i`` (int64 [b], within this split): uint8 [b, 3, H, W]."""

    @abstractmethod
    def captions_at(self, i: Tensor | None = None) -> list[str]:
        """Texts at places ``i`` (int64 [b], within this split); all n of them when ``i`` is None."""

    @abstractmethod
    def vocabulary_texts(self) -> Iterable[str]:
        """Texts whose words make the vocabulary. Never from the test part."""


@dataclass(eq=False)
class PairSet(Pairs):
    """Pairs held in memory.

    Args:
        images: uint8 [n, 3, H, W].
        captions: n texts.
        keys: n unique names of samples.
        fields: further columns by name, n values each.
        vocabulary: what ``vocabulary_texts`` gives.
    """

    name: str
    split: str
    images: Tensor
    captions: list[str]
    index: Tensor
    group: Tensor
    keys: list[str]
    content_hash: str
    fields: dict[str, list[Any]] = field(default_factory=dict)
    vocabulary: list[str] = field(default_factory=list, repr=False)

    def __post_init__(self) -> None:
        self.image_size = int(self.images.shape[-1])

    def __repr__(self) -> str:
        return f"PairSet({self.name!r}, {self.split!r}, {len(self)} pairs of {self.image_size} px)"

    def images_at(self, i: Tensor) -> Tensor:
        return self.images.index_select(0, i)

    def captions_at(self, i: Tensor | None = None) -> list[str]:
        if i is None:
            return list(self.captions)
        return [self.captions[k] for k in i.tolist()]

    def vocabulary_texts(self) -> list[str]:
        return list(self.vocabulary)

    def at(self, i: Tensor) -> PairSet:
        """The pairs at places ``i`` (int64 [b]), in that order."""
        places = i.tolist()
        return PairSet(
            name=self.name,
            split=self.split,
            images=self.images.index_select(0, i),
            captions=[self.captions[k] for k in places],
            index=self.index[i],
            group=self.group[i],
            keys=[self.keys[k] for k in places],
            content_hash=self.content_hash,
            fields={name: [column[k] for k in places] for name, column in self.fields.items()},
            vocabulary=self.vocabulary,
        )

    def where(self, **wanted: Any) -> PairSet:
        """The pairs whose fields have the wanted values, for instance ``where(vendor="openmoji", tone=["", "dark"])``.

        Args:
            wanted: one value a field, or a list, tuple or set of allowed values.

        Raises:
            ValueError: for an unknown field, or when no pair is left; both list what there is.
        """
        keep = torch.ones(len(self), dtype=torch.bool)
        for name, value in wanted.items():
            allowed = value if isinstance(value, list | tuple | set | frozenset) else (value,)
            keep &= torch.tensor([cell in allowed for cell in self._column(name)], dtype=torch.bool)
        if not keep.any():
            raise ValueError(f"{self.name!r} has no pair with {_text(wanted)}; there is {self._values(wanted)}")
        return self.at(keep.nonzero()[:, 0])

    def _column(self, name: str) -> list[Any]:
        if name not in self.fields:
            known = ", ".join(self.fields) or "none"
            raise ValueError(f"{self.name!r} has no field {name!r}; its fields: {known}")
        return self.fields[name]

    def _values(self, names: Iterable[str]) -> str:
        values = {name: sorted({repr(cell) for cell in self.fields[name]}) for name in names}
        return "; ".join(f"{name} in {', '.join(cells[:12])}" for name, cells in values.items())


def _text(wanted: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in wanted.items())


class Chosen(Pairs):
    """Some of the pairs of a set, without a copy of them.

    Args:
        pairs: the set.
        places: ``[k]`` which of its pairs, in the order wanted.
    """

    def __init__(self, pairs: Pairs, places: Tensor) -> None:
        self.name, self.split, self.image_size = pairs.name, pairs.split, pairs.image_size
        self.content_hash = pairs.content_hash
        self.index, self.group = pairs.index[places], pairs.group[places]
        self._pairs, self._places = pairs, places

    def images_at(self, i: Tensor) -> Tensor:
        return self._pairs.images_at(self._places[i])

    def captions_at(self, i: Tensor | None = None) -> list[str]:
        return self._pairs.captions_at(self._places if i is None else self._places[i])

    def vocabulary_texts(self) -> Iterable[str]:
        return self._pairs.vocabulary_texts()
