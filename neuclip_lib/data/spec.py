"""What a data set is: what its builder returns, what it says about itself, and its zero-shot tasks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

if TYPE_CHECKING:
    from neuclip_lib.data.pairs import Pairs

PLACEHOLDER = "{}"


@dataclass(frozen=True)
class RawSet:
    """All samples of one set, before the split: row i of every column is sample i.

    Args:
        images: uint8 [n, 3, H, W].
        captions: n texts.
        group: n concept keys; every caption of a concept is right for every image of it.
        split_key: n texts; their hash decides the split, so whatever must not leak shares one.
        key: n unique, stable names of samples (they name a sample in messages and pictures).
        fields: further columns by name, n JSON values each (for instance the vendor).

    Raises:
        ValueError: when a column has another length, images another shape or type, or keys repeat.
    """

    images: np.ndarray
    captions: list[str]
    group: list[str]
    split_key: list[str]
    key: list[str]
    fields: dict[str, list[Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        shape, n = self.images.shape, len(self.images)
        if self.images.dtype != np.uint8 or len(shape) != 4 or shape[1] != 3 or shape[2] != shape[3]:
            raise ValueError(f"images must be uint8 [n, 3, S, S], got {self.images.dtype} {list(shape)}")
        columns: dict[str, Sequence[Any]] = {name: getattr(self, name) for name in _TEXT_COLUMNS} | self.fields
        for name, column in columns.items():
            if len(column) != n:
                raise ValueError(f"column {name!r} has {len(column)} rows for {n} images")
        if len(set(self.key)) != n:
            twice, _ = Counter(self.key).most_common(1)[0]
            raise ValueError(f"keys must be unique, {twice!r} stands twice")
        if empty := [key for key, caption in zip(self.key, self.captions, strict=True) if not caption.strip()]:
            raise ValueError(f"{len(empty)} captions are empty, the first one of {empty[0]!r}")


_TEXT_COLUMNS = ("captions", "group", "split_key", "key")


@dataclass(frozen=True)
class ZeroShotTask:
    """Images to sort into named classes with texts alone.

    Args:
        name: of the task, for instance ``"digits"``.
        images: uint8 [n, 3, H, W].
        labels: int64 [n], places in ``classes``.
        classes: names that are put into the templates.
        templates: sentences with ``{}`` where the class name goes.

    Raises:
        ValueError: when shapes or labels do not fit, or a template has no ``{}``.
    """

    name: str
    images: Tensor
    labels: Tensor
    classes: list[str]
    templates: list[str]

    def __post_init__(self) -> None:
        if len(self.images) != len(self.labels):
            raise ValueError(f"task {self.name!r} has {len(self.images)} images and {len(self.labels)} labels")
        if len(self.labels) and not 0 <= int(self.labels.min()) <= int(self.labels.max()) < len(self.classes):
            raise ValueError(f"task {self.name!r}: labels must lie in 0..{len(self.classes) - 1}")
        if not self.templates:
            raise ValueError(f"task {self.name!r} has no template")
        for template in self.templates:
            if template.count(PLACEHOLDER) != 1:
                raise ValueError(f"task {self.name!r}: template {template!r} must hold {{}} once")

    def texts(self, template: str) -> list[str]:
        """The sentences of one template, one a class. Braces in a class name stay as they are."""
        return [template.replace(PLACEHOLDER, name) for name in self.classes]


@dataclass(frozen=True)
class SetSpec:
    """One data set: what it is, where it comes from, and how it is made (``SPEC`` of each module in ``sets``).

    Args:
        name: as on the command line, equal to the module's name.
        title: one line for people.
        origin: where the pictures and texts come from.
        licence: of pictures and texts.
        attribution: the line that must stand under a published picture, or "" when none is needed.
        task: what the set is used for.
        image_size: side in pixels.
        packages: pip distributions it is made from; their versions enter the cache's key.
        produce: makes the set from the installed packages. None for a set that is opened and never stored.
        open: ``open(split, **options)`` gives the pairs of a set that is never stored (procedural).
        zero_shot: gives the tasks on the pairs that ``load`` returned for one split.
        system: finds a source outside pip and returns {what: version} for the cache's key; raises RuntimeError
            saying what is missing and how to get it.
        helpers: further modules whose source decides what is built; the builder's own module always counts.
        counts: samples in train, validation and test with the pinned packages (a test builds and compares).
        optional: not built by ``build all`` when its source is missing.
        note: what a reader should know before trusting numbers on it.
    """

    name: str
    title: str
    origin: str
    licence: str
    attribution: str
    task: str
    image_size: int
    packages: tuple[str, ...] = ()
    produce: Callable[[], RawSet] | None = None
    open: Callable[..., Pairs] | None = None
    zero_shot: Callable[[Any], list[ZeroShotTask]] | None = None
    system: Callable[[], Mapping[str, str]] | None = None
    helpers: tuple[str, ...] = ()
    counts: Mapping[str, int] = field(default_factory=dict)
    optional: bool = False
    note: str = ""

    def __post_init__(self) -> None:
        if (self.produce is None) == (self.open is None):
            raise ValueError(f"set {self.name!r} must have exactly one of produce and open")


@dataclass(frozen=True)
class Card:
    """What a set says about itself, and what of it is on this machine.

    Attributes:
        counts: samples in train, validation and test, of the built set if there is one; empty for "any number".
        state: "ready", "missing", "stale" or "damaged" for a stored set, "made on the fly" for the others.
        lacking: what must be installed before it can be built here, or "".
        (The others are the fields of ``SetSpec``.)
    """

    name: str
    title: str
    origin: str
    licence: str
    attribution: str
    task: str
    image_size: int
    packages: tuple[str, ...]
    optional: bool
    note: str
    counts: Mapping[str, int]
    state: str
    lacking: str
