"""From a config to the parts of a run: for the trainer, and for whoever opens a run later."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from neuclip_lib.data.pairs import Pairs
from neuclip_lib.methods import Settings
from neuclip_lib.normalizers import Normalizer
from neuclip_lib.parts import Parts
from neuclip_lib.ranks import ONE, Ranks
from neuclip_lib.training.config import TrainConfig


@dataclass(frozen=True)
class Samples:
    """What a method may know of the training data.

    Args:
        n: an index is from 0 to n - 1; more than the pairs trained on where these are part of a set.
        steps_per_epoch: whole batches in one pass.
    """

    n: int
    steps_per_epoch: int

    @staticmethod
    def of(pairs: Pairs, batch_size: int) -> Samples:
        """Those of training on ``pairs``."""
        return Samples(index_end(pairs), len(pairs) // batch_size)


def index_end(pairs: Pairs) -> int:
    """One more than the largest index.

    Raises:
        ValueError: for a negative index.
    """
    if (low := int(pairs.index.min())) < 0:
        raise ValueError(f"the data set {pairs.name!r} has the sample index {low}; an index is 0 or more")
    return int(pairs.index.max()) + 1


def settings_of(config: TrainConfig, dim: int, device: torch.device, samples: Samples, ranks: Ranks = ONE) -> Settings:
    """What a method needs to know of this run."""
    return Settings(
        dim=dim,
        batch_size=config.batch_size,
        temperature=config.temperature,
        prototypes=config.prototypes,
        moving_average=config.moving_average,
        amortized=config.amortized,
        siglip=config.siglip,
        kcl=config.kcl,
        n=samples.n,
        steps_per_epoch=samples.steps_per_epoch,
        epochs=max(1, math.ceil(config.steps / samples.steps_per_epoch)),
        seed=config.seed,
        device=device,
        ranks=ranks,
    )


def estimators_of(method: str, parts: Parts, shadows: Mapping[str, Normalizer]) -> dict[str, Normalizer]:
    """By method, the normalizers whose error can be measured: the run's own, if it has one, and its shadows."""
    own = {} if parts.normalizer is None else {method: parts.normalizer}
    return {**own, **shadows}
