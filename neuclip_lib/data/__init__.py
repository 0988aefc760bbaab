"""Image-text data sets: built from installed packages once, kept whole on disk, split by a hash."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import numpy as np
import torch

from neuclip_lib.data.building import build_set, ready
from neuclip_lib.data.cache import Cached
from neuclip_lib.data.cards import card_of
from neuclip_lib.data.pairs import Pairs, PairSet
from neuclip_lib.data.registry import names, spec_of
from neuclip_lib.data.spec import Card, RawSet, SetSpec, ZeroShotTask
from neuclip_lib.data.splits import SPLITS, part_of, parts_in

__all__ = [
    "SPLITS",
    "Card",
    "PairSet",
    "Pairs",
    "RawSet",
    "SetSpec",
    "ZeroShotTask",
    "build",
    "card",
    "load",
    "names",
    "zero_shot_tasks",
]


def card(name: str) -> Card:
    """What a set says about itself, and what of it is on this machine.

    Raises:
        ValueError: for an unknown set.
    """
    return card_of(spec_of(name))


def build(name: str, force: bool = False, quiet: bool = False) -> Path:
    """Make sure that a set is built, whole and up to date; return its folder.

    Args:
        force: build again even if it is.
        quiet: print nothing.

    Raises:
        ValueError: for an unknown set, or one that is never stored.
        RuntimeError: when a package is missing, a picture fails, or the folder cannot be written.
    """
    return build_set(spec_of(name), force=force, quiet=quiet)


def load(name: str, split: str, **options: Any) -> Pairs:
    """The pairs of one split; the set is built first when it is missing, stale or damaged.

    Args:
        split: "train", "validation", "test", "train+validation" or "all".
        options: for a stored set, wanted values of its fields (``vendor="openmoji"``); for a procedural one,
            what its ``open`` takes (``n=100_000``).

    Raises:
        ValueError: for an unknown set, split or field, or when no pair is left.
        RuntimeError: when the set cannot be built.
    """
    spec = spec_of(name)
    parts_in(split)
    if spec.open is not None:
        known = [option for option in inspect.signature(spec.open).parameters if option != "split"]
        if unknown := [option for option in options if option not in known]:
            raise ValueError(f"{name!r} has no option {unknown[0]!r}; its options: {', '.join(known)}")
        return spec.open(split, **options)
    return _pick(_whole(name, ready(spec)), split, options)


def zero_shot_tasks(name: str, split: str = "test", **options: Any) -> list[ZeroShotTask]:
    """The zero-shot tasks of one split; an empty list for a set without any.

    Raises:
        ValueError, RuntimeError: as ``load``.
    """
    spec = spec_of(name)
    return [] if spec.zero_shot is None else spec.zero_shot(load(name, split, **options))


def _whole(name: str, cached: Cached) -> tuple[PairSet, list[str]]:
    """All pairs of a set, and the part that each falls in."""
    columns = cached.columns
    numbers = {concept: number for number, concept in enumerate(dict.fromkeys(columns["group"]))}
    pairs = PairSet(
        name=name,
        split="all",
        images=torch.from_numpy(np.ascontiguousarray(cached.images)),
        captions=columns["captions"],
        index=torch.arange(len(cached.images)),
        group=torch.tensor([numbers[concept] for concept in columns["group"]], dtype=torch.int64),
        keys=columns["key"],
        content_hash=cached.manifest["content_hash"],
        fields=columns["fields"],
    )
    return pairs, [part_of(key) for key in columns["split_key"]]


def _pick(whole: tuple[PairSet, list[str]], split: str, wanted: dict[str, Any]) -> PairSet:
    """One split of what the options leave. Words come from the parts in it that are not test, else from train."""
    pairs, parts = whole
    if wanted:
        pairs = pairs.where(**wanted)
        parts = [parts[k] for k in pairs.index.tolist()]
    inside = parts_in(split)
    spoken = [part for part in inside if part != "test"] if "train" in inside else ["train"]
    picked = pairs.at(torch.tensor([k for k, part in enumerate(parts) if part in inside], dtype=torch.int64))
    picked.split = split
    picked.vocabulary = [caption for caption, part in zip(pairs.captions, parts, strict=True) if part in spoken]
    if not len(picked):
        raise ValueError(f"{pairs.name!r} has no pair in split {split!r} with {wanted}")
    return picked
