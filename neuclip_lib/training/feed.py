"""The batches of a run: what step k sees is a pure function of (data, seed, k), so a run resumes from one integer."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor

from neuclip_lib.data.order import batch_indices, epoch_of
from neuclip_lib.data.pairs import Pairs, PairSet
from neuclip_lib.data.transforms import shift, to_float
from neuclip_lib.models import ImageTextModel


@dataclass(frozen=True)
class Batch:
    """A process's share of one step on its device: images ``[b, 3, H, W]``, tokens ``[b, L]``, stable index ``[b]``."""

    images: Tensor
    tokens: Tensor
    index: Tensor


class Feed:
    """Gives the batch of any step, in any order.

    Args:
        pairs: what is trained on; texts held in memory are turned into tokens once.
        batch_size: global batch B.
        shift_pixels: by how much an image may move.
        device: where the batches go; pictures travel as bytes.
        rows: of the global batch that this process trains on; all if not given. What a sample looks like and when it
            comes does not depend on it.
    """

    def __init__(
        self,
        pairs: Pairs,
        model: ImageTextModel,
        batch_size: int,
        seed: int,
        shift_pixels: int,
        device: torch.device,
        rows: slice | None = None,
    ) -> None:
        self.rows = slice(0, batch_size) if rows is None else rows
        self.pairs, self.model, self.device = pairs, model, device
        self.batch_size, self.seed, self.shift_pixels = batch_size, seed, shift_pixels
        self._tokens = model.tokenize(pairs.captions_at()) if isinstance(pairs, PairSet) else None

    def epoch(self, step: int) -> int:
        """The pass through the data that ``step`` belongs to, from 0."""
        return epoch_of(len(self.pairs), self.batch_size, step)

    def batch(self, step: int) -> Batch:
        """This process's samples of one step, augmented."""
        places = batch_indices(len(self.pairs), self.batch_size, self.seed, step)[self.rows]
        images = self.pairs.images_at(places).to(self.device)
        if self.shift_pixels:
            part = self.batch_size, self.rows
            images = shift(images, self.shift_pixels, step_generator(self.seed, step), part)
        tokens = self.model.tokenize(self.pairs.captions_at(places)) if self._tokens is None else self._tokens[places]
        return Batch(to_float(images), tokens.to(self.device), self.pairs.index[places].to(self.device))


def step_generator(seed: int, step: int) -> torch.Generator:
    """The augmentation's generator for one step; hashed: neighbouring seeds and steps have nothing in common."""
    digest = hashlib.sha256(f"augment {seed} {step}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
