"""The order of samples: a pure function of (n, batch size, seed, step), so that resuming needs one integer."""

from __future__ import annotations

import functools
import hashlib

import torch
from torch import Tensor


def steps_per_epoch(n: int, batch_size: int) -> int:
    """Whole batches in one pass; the last, smaller one is left out and its samples come in another epoch.

    Raises:
        ValueError: when the batch has fewer than 2 pairs (no negatives) or more than there are.
    """
    if batch_size < 2:
        raise ValueError(f"batch_size must be at least 2 (a pair needs a negative), got {batch_size} for {n} pairs")
    if batch_size > n:
        raise ValueError(f"batch_size {batch_size} is larger than the data ({n} pairs); take at most {n}")
    return n // batch_size


def epoch_of(n: int, batch_size: int, step: int) -> int:
    """The epoch, from 0, that a step lies in.

    Raises:
        ValueError: as ``steps_per_epoch``, and for a negative step.
    """
    per_epoch = steps_per_epoch(n, batch_size)
    if step < 0:
        raise ValueError(f"step must not be negative, got {step}")
    return step // per_epoch


def batch_indices(n: int, batch_size: int, seed: int, step: int) -> Tensor:
    """Places of the samples of one step: int64 [batch_size], no place twice within an epoch.

    Raises:
        ValueError: as ``epoch_of``.
    """
    epoch = epoch_of(n, batch_size, step)
    first = (step - epoch * steps_per_epoch(n, batch_size)) * batch_size
    return _permutation(n, seed, epoch)[first : first + batch_size].clone()  # a copy: the cached one stays as it is


@functools.lru_cache(maxsize=2)
def _permutation(n: int, seed: int, epoch: int) -> Tensor:
    """The order of one epoch, int64 [n]. Seed and epoch are hashed: seed 1, epoch 0 is not seed 0, epoch 1."""
    digest = hashlib.sha256(f"order {seed} {epoch}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    return torch.randperm(n, generator=generator)
