"""What a method is made of: its entry in the table, what it is told, and its parts, which turn a batch into a loss.

The trainer and the drop-in for open_clip call the same parts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from neuclip_lib.contrast import GlobalBatch, Sides, log_mean_exp_over_negatives
from neuclip_lib.losses import KclOptions, Objective, SiglipOptions, global_contrastive_loss
from neuclip_lib.normalizers import (
    AmortizedOptions,
    MovingAverageOptions,
    Normalizer,
    PrototypeOptions,
    Stabilised,
)
from neuclip_lib.per_sample_temperature import PerSampleTemperature
from neuclip_lib.ranks import ONE, Ranks
from neuclip_lib.temperature import AnyTemperature, Temperature, TemperatureOptions


@dataclass
class Outcome:
    """What one batch gave: the loss with its graph; of this rank's anchors, detached, what it was made from.

    The last three are None for losses without a normalizer.
    """

    loss: Tensor
    log_g: Sides | None = None
    alpha: Sides | None = None
    log_eps_plus_g: Sides | None = None


class Parts:
    """The parts of a method.

    Attributes:
        normalizer: where alpha comes from; None for a loss without one.
        learned: scalars that the loss learns besides the temperature; usually empty.
    """

    normalizer: Normalizer | None = None

    def __init__(self) -> None:
        self.learned = nn.Module()

    def loss(self, e1: Tensor, e2: Tensor, batch: GlobalBatch, tau: Tensor) -> Outcome:
        """One step's loss; the normalizer sees the batch first.

        Args:
            e1: image embeddings of this rank's anchors ``[b, d]``, unit rows, with gradient.
            e2: text embeddings, the same.
            batch: all ranks' embeddings, detached.
            tau: temperature: a scalar, or ``[2, B]``.
        """
        raise TypeError(f"{type(self).__name__} does not say how its loss is computed")


Adjust = Callable[[Stabilised, Sides], Stabilised]
"""From (alpha, log(eps + g)) to the alpha that the encoder step uses."""


def as_it_is(raw: Stabilised, log_eps_plus_g: Sides) -> Stabilised:
    """No stabiliser."""
    return raw


class Contrastive(Parts):
    """A member of the family: the methods differ in the normalizer, and in eps and the factor of the objective.

    Args:
        normalizer: where alpha comes from.
        objective: eps, factor, rho.
        adjust: a stabiliser of alpha.
    """

    normalizer: Normalizer

    def __init__(self, normalizer: Normalizer, objective: Objective, adjust: Adjust = as_it_is) -> None:
        super().__init__()
        self.normalizer, self.objective, self.adjust = normalizer, objective, adjust

    def loss(self, e1: Tensor, e2: Tensor, batch: GlobalBatch, tau: Tensor) -> Outcome:
        with torch.no_grad():
            log_g = log_mean_exp_over_negatives(e1, e2, batch, tau)  # [b] a side
        self.normalizer.update(batch, log_g, tau)
        used = self.alpha(e1, e2, log_g, batch, tau)  # [b] a side: the only line that differs between methods
        loss = global_contrastive_loss(e1, e2, used.alpha, batch, tau, self.objective, log_g, used.batch_part)
        held = used.alpha[0].detach(), used.alpha[1].detach()
        return Outcome(loss, log_g, held, self.objective.log_eps_plus_g(log_g, batch.size))

    def alpha(self, e1: Tensor, e2: Tensor, log_g: Sides, batch: GlobalBatch, tau: Tensor) -> Stabilised:
        """The alpha of the encoder step."""
        raw = Stabilised(self.normalizer(e1, e2, log_g, batch, tau))
        return self.adjust(raw, self.objective.log_eps_plus_g(log_g, batch.size))


PairLoss = Callable[[Tensor, Tensor, GlobalBatch, Tensor, nn.Module], Tensor]
"""From (e1, e2, batch, tau, learned scalars) to the loss."""


class Pairwise(Parts):
    """A loss without a normalizer.

    Args:
        function: the loss.
        learned: scalars it learns; none if not given.
    """

    def __init__(self, function: PairLoss, learned: nn.Module | None = None) -> None:
        super().__init__()
        self.function = function
        if learned is not None:
            self.learned = learned

    def loss(self, e1: Tensor, e2: Tensor, batch: GlobalBatch, tau: Tensor) -> Outcome:
        return Outcome(self.function(e1, e2, batch, tau, self.learned))


@dataclass(frozen=True)
class Settings:
    """What a method may need to know to build its parts.

    Args:
        dim: embedding dimension d.
        batch_size: global batch B.
        n: samples that an index may name; None where batches carry no index.
        steps_per_epoch: steps in one pass over the data.
        epochs: passes in the whole run.
    """

    dim: int
    batch_size: int
    temperature: TemperatureOptions = field(default_factory=TemperatureOptions)
    prototypes: PrototypeOptions = field(default_factory=PrototypeOptions)
    moving_average: MovingAverageOptions = field(default_factory=MovingAverageOptions)
    amortized: AmortizedOptions = field(default_factory=AmortizedOptions)
    siglip: SiglipOptions = field(default_factory=SiglipOptions)
    kcl: KclOptions = field(default_factory=KclOptions)
    n: int | None = None
    steps_per_epoch: int = 1
    epochs: int = 1
    seed: int = 0
    device: torch.device | str = "cpu"
    dtype: torch.dtype = torch.float32
    ranks: Ranks = ONE

    @property
    def samples(self) -> int:
        """Samples that an index may name.

        Raises:
            ValueError: when the batches carry no index.
        """
        if self.n is None:
            raise ValueError("this method keeps numbers per sample and needs a stable index with every batch")
        return self.n


def one_temperature(settings: Settings) -> AnyTemperature:
    """One tau for all samples."""
    return Temperature(settings.temperature).to(device=settings.device, dtype=settings.dtype)


def temperature_per_sample(settings: Settings, root: bool = True) -> AnyTemperature:
    """One tau a sample and side; ``root=False`` divides by Adam's second moment itself, as published code does.

    Raises:
        ValueError: when the batches carry no index.
    """
    return PerSampleTemperature(
        settings.temperature,
        settings.samples,
        settings.steps_per_epoch,
        settings.ranks,
        settings.device,
        settings.dtype,
        root,
    )


@dataclass(frozen=True)
class Method:
    """One row of the table.

    Args:
        name: as given to ``--method``.
        title: the name people use.
        normalizer: where alpha comes from, in words.
        source: paper and code it follows.
        build: makes the parts.
        tau: ``free`` (fixed, annealed or learned, as the options say), ``fixed`` (never learned), ``per sample`` (one a
            sample and side, always learned) or ``unused``.
        temperature: makes the temperature.
        needs_index: whether batches must carry a stable sample index.
        has_normalizer: whether it estimates a log-normalizer, which can then ride along in another method's run.
        defaults: options a preset takes for this method in place of its own, by dotted name.
    """

    name: str
    title: str
    normalizer: str
    source: str
    build: Callable[[Settings], Parts]
    tau: Literal["free", "fixed", "per sample", "unused"] = "free"
    temperature: Callable[[Settings], AnyTemperature] = one_temperature
    needs_index: bool = False
    has_normalizer: bool = True
    defaults: Mapping[str, Any] = field(default_factory=dict)

    def check(self, temperature: TemperatureOptions) -> None:
        """Refuse temperature options that the method cannot follow.

        Raises:
            ValueError: saying what to do instead.
        """
        if temperature.learned and self.tau in ("fixed", "unused"):
            why = "holds the temperature fixed" if self.tau == "fixed" else "does not use the temperature"
            raise ValueError(f"{self.name} {why}; set temperature.learned to False, or choose another method")
        if temperature.anneal != "none" and self.tau == "per sample":
            raise ValueError(f"{self.name} learns one temperature per sample, which cannot be annealed")
