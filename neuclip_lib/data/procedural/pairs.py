"""Procedural pairs: addresses in memory, pictures and captions made when asked for."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from neuclip_lib.data.pairs import Pairs
from neuclip_lib.data.procedural import drawing, grammar, scenes
from neuclip_lib.data.splits import parts_in

CHUNK = 256  # samples drawn at once: bounds the memory, and more no longer fit in the processor's cache
SMALLEST, LARGEST = 16, 256  # sides in pixels
MOST_PAIRS = 2**31


class ProceduralPairs(Pairs):
    """The part of samples 0..n-1 that falls in ``split``; holds their addresses alone.

    Sample i is the same for every n, so a larger n adds samples and moves none between the parts.

    Args:
        split: "train", "validation", "test", "train+validation" or "all".
        n: samples in the whole set, all parts together.
        seed: another seed gives other scenes and pictures; the parts stay.
        size: side of a picture in pixels.

    Raises:
        ValueError: for an unknown split, or n, seed or size out of range.
    """

    def __init__(self, split: str, n: int, seed: int, size: int) -> None:
        self.parts = parts_in(split)
        _check("n", n, 100, MOST_PAIRS)
        _check("seed", seed, 0, 2**63 - 1)
        _check("size", size, SMALLEST, LARGEST)
        self.name, self.split, self.n, self.seed, self.image_size = "captions", split, n, seed, size
        places = np.arange(n)
        inside = [chunk[np.isin(scenes.parts(chunk), self.parts)] for chunk in np.array_split(places, -(-n // 2**16))]
        self.index = torch.from_numpy(np.concatenate(inside))
        self.content_hash = _content_hash(n, seed, size)

    def __repr__(self) -> str:
        return (
            f"ProceduralPairs({self.split!r}, n={self.n}, seed={self.seed}, size={self.image_size}: {len(self)} pairs)"
        )

    @cached_property
    def group(self) -> Tensor:  # type: ignore[override]
        """int64 [n]: equal for scenes that say the same; made at the first use, 8 bytes a sample."""
        made = [scenes.meanings(scenes.scenes(self.seed, chunk)) for chunk in self._chunks(self.index.numpy(), 2**16)]
        return torch.from_numpy(np.concatenate(made))

    def images_at(self, i: Tensor) -> Tensor:
        index = self.index[i].numpy()
        images = np.empty((len(index), 3, self.image_size, self.image_size), np.uint8)
        for start in range(0, len(index), CHUNK):
            chunk = index[start : start + CHUNK]
            table = scenes.scenes(self.seed, chunk)
            images[start : start + CHUNK] = drawing.draw(table, self.seed, "picture", chunk, self.image_size)
        return torch.from_numpy(images)

    def captions_at(self, i: Tensor | None = None) -> list[str]:
        index = self.index.numpy() if i is None else self.index[i].numpy()
        return [grammar.describe(scene) for scene in self._scenes(index)]

    def scenes_at(self, i: Tensor) -> list[grammar.Scene]:
        """What the pictures at places ``i`` (int64 [b]) show."""
        return list(self._scenes(self.index[i].numpy()))

    def vocabulary_texts(self) -> Iterable[str]:
        return grammar.vocabulary()

    def _scenes(self, index: np.ndarray) -> Iterable[grammar.Scene]:
        for chunk in self._chunks(index, CHUNK):
            table = scenes.scenes(self.seed, chunk)
            yield from (scenes.scene_at(table, row) for row in range(len(chunk)))

    @staticmethod
    def _chunks(index: np.ndarray, size: int) -> Iterable[np.ndarray]:
        return (index[start : start + size] for start in range(0, len(index), size))


def _check(name: str, value: int, low: int, high: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise ValueError(f"{name} of the set 'captions' must be a whole number in {low}..{high}, got {value!r}")


def _content_hash(n: int, seed: int, size: int) -> str:
    """Of the code that makes the pairs and of what it is asked for: pictures are never all made to hash them."""
    digest = hashlib.sha256(json.dumps({"n": n, "seed": seed, "size": size}).encode())
    for module in (grammar, scenes, drawing):
        assert module.__file__ is not None
        digest.update(Path(module.__file__).read_bytes().replace(b"\r\n", b"\n"))
    return digest.hexdigest()
