"""A method ready to use: a batch of embeddings in, a loss out. The trainer and the drop-in for open_clip share it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from neuclip_lib.contrast import GlobalBatch, Sides, log_mean_exp_over_negatives
from neuclip_lib.losses import Objective, global_contrastive_loss
from neuclip_lib.normalizers import Normalizer, Stabilised


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
