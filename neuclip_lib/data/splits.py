"""Train, validation and test by a hash of what must not leak."""

from __future__ import annotations

import difflib
import hashlib

PARTS = ("train", "validation", "test")
SPLITS: dict[str, tuple[str, ...]] = {
    "train": ("train",),
    "validation": ("validation",),
    "test": ("test",),
    "train+validation": ("train", "validation"),
    "all": PARTS,
}


def part_of(key: str) -> str:
    """The part that a key falls in: md5 modulo 7 is 0 for test, 1 for validation, else train.

    The hash needs no list and no seed, so a sample stays where it is when others come or go.
    """
    bucket = int(hashlib.md5(key.encode("utf-8"), usedforsecurity=False).hexdigest(), 16) % 7
    return {0: "test", 1: "validation"}.get(bucket, "train")


def parts_in(split: str) -> tuple[str, ...]:
    """The parts that a split's name stands for.

    Raises:
        ValueError: for another name, listing the known ones.
    """
    if split in SPLITS:
        return SPLITS[split]
    close = difflib.get_close_matches(split, SPLITS, n=1)
    hint = f" (did you mean {close[0]!r}?)" if close else ""
    raise ValueError(f"there is no split {split!r}{hint}; known: {', '.join(SPLITS)}")
