"""From a config to the parts of a run: for the trainer, and for whoever opens a run later."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from neuclip_lib.data.pairs import Pairs
from neuclip_lib.methods import Settings, get_method
from neuclip_lib.models import ImageTextModel
from neuclip_lib.normalizers import Normalizer
from neuclip_lib.parts import Parts
from neuclip_lib.ranks import ONE, Ranks
from neuclip_lib.training.config import TrainConfig
from neuclip_lib.training.distributed import wrap
from neuclip_lib.training.optim import build_optimizer
from neuclip_lib.training.precision import LossScale
from neuclip_lib.training.step import Trainee


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


def build_trainee(
    config: TrainConfig,
    model: ImageTextModel,
    device: torch.device,
    samples: Samples,
    ranks: Ranks = ONE,
    dtype: torch.dtype = torch.float32,
) -> Trainee:
    """The encoders with a fresh temperature, normalizers and optimizer.

    Args:
        dtype: of the normalizers and the temperature; float64 in tests.
    """
    settings = replace(settings_of(config, model.dim, device, samples, ranks), dtype=dtype)
    method = get_method(config.method)
    temperature, parts = method.temperature(settings), method.build(settings)
    shadows = {name: get_method(name).build(settings).normalizer for name in config.shadows}
    return Trainee(
        model=model,
        temperature=temperature,
        parts=parts,
        shadows={name: shadow for name, shadow in shadows.items() if shadow is not None},
        optimizer=build_optimizer(
            model, temperature.parameters(), config.optim, config.temperature, parts.learned.parameters()
        ),
        scale=LossScale(config.precision, device),
        ranks=ranks,
        encoders=wrap(model, ranks),
    )
