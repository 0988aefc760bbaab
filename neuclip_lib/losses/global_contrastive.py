"""The global contrastive loss after the conjugate rewrite: one loss for every normalizer.

    L = sigma/(2B) sum_i [ h1_i + h2_i ] + rho tau,     h = exp(-alpha)(eps + g) + alpha - 1

with ``sigma = tau`` when the objective is scaled (GCL, RGCL-g) and 1 otherwise. The papers write the sum of both sides
and ``2 rho tau``; we take half of that, so gradients are on the scale of averaged cross-entropy.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from neuclip_lib.conjugate import residual, rewrite
from neuclip_lib.contrast import GlobalBatch, Sides, gradients_of_weighted_differences, log_mean_exp_over_negatives


@dataclass(frozen=True)
class Objective:
    """What is added to g, and what stands in front of the logarithm.

    Args:
        eps: constant inside the logarithm; ``None`` means ``1/(B-1)``, which is InfoNCE: the positive is one of the
            terms of the denominator.
        scaled: multiply by tau (GCL, RGCL-g).
        rho: weight of the ``+ rho tau`` that keeps a learned temperature from running to a bound.
    """

    eps: float | None
    scaled: bool
    rho: float = 0.0

    def __post_init__(self) -> None:
        if self.eps is not None and not (math.isfinite(self.eps) and self.eps >= 0):
            raise ValueError(f"eps must be finite and not negative, or None for 1/(B-1); got {self.eps}")

    def log_eps(self, size: int) -> float:
        """``log eps`` for a global batch of ``size`` pairs; minus infinity for ``eps = 0``."""
        if self.eps is None:
            return -math.log(size - 1)
        return math.log(self.eps) if self.eps > 0 else -math.inf

    def log_eps_plus_g(self, log_g: Sides, size: int) -> Sides:
        """``log(eps + g)`` of both sides, the alpha that is exact for this batch."""
        log_eps = torch.as_tensor(self.log_eps(size), dtype=log_g[0].dtype, device=log_g[0].device)
        return torch.logaddexp(log_eps, log_g[0]), torch.logaddexp(log_eps, log_g[1])

    def value(self, alpha: Sides, log_g: Sides, tau: Tensor, size: int) -> Tensor:
        """The loss itself from alpha and log_g (no closed-form gradients; used for reporting)."""
        log_x = self.log_eps_plus_g(log_g, size)
        h = (rewrite(alpha[0], log_x[0]) + rewrite(alpha[1], log_x[1])).mean() / 2
        return h * (tau if self.scaled else 1.0) + self.rho * tau


def global_contrastive_loss(
    e1: Tensor, e2: Tensor, alpha: Sides, batch: GlobalBatch, tau: Tensor, objective: Objective, log_g: Sides
) -> Tensor:
    """The loss, with closed-form gradients in both embeddings, both alphas and tau.

    Three matrix products of B x B x d in all with ``log_mean_exp_over_negatives``: the similarities, and the two of the
    gradient. Where alpha is differentiable in ``log_g`` (a weight cap), its backward takes two more.

    Args:
        e1: image embeddings ``[B, d]``, unit rows, with gradient.
        e2: text embeddings ``[B, d]``, unit rows, with gradient.
        alpha: log-normalizers of image and text anchors, each ``[B]``; constants, or differentiable in anything.
        batch: the same embeddings, detached.
        tau: temperature, a scalar tensor.
        objective: eps, factor tau, rho.
        log_g: what ``log_mean_exp_over_negatives(e1, e2, batch, tau)`` gave; only its values are used.

    Returns:
        A scalar. It can be differentiated once.
    """
    return _GlobalContrastive.apply(
        e1, e2, alpha[0], alpha[1], tau, batch, objective, (log_g[0].detach(), log_g[1].detach())
    )


def info_nce(e1: Tensor, e2: Tensor, tau: Tensor) -> Tensor:
    """InfoNCE, the loss of CLIP: the mean of both cross-entropies, as the family's member with ``eps = 1/(B-1)``.

    ``log(1 + (B-1) g) = log(B-1) + log(1/(B-1) + g)``. Arguments as in :func:`global_contrastive_loss`.
    """
    batch, objective = GlobalBatch(e1, e2), Objective(eps=None, scaled=False)
    log_g = log_mean_exp_over_negatives(e1, e2, batch, tau)
    exact = objective.log_eps_plus_g((log_g[0].detach(), log_g[1].detach()), batch.size)
    return global_contrastive_loss(e1, e2, exact, batch, tau, objective, log_g) + math.log(batch.size - 1)


class _GlobalContrastive(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        e1: Tensor,
        e2: Tensor,
        alpha1: Tensor,
        alpha2: Tensor,
        tau: Tensor,
        batch: GlobalBatch,
        objective: Objective,
        log_g: Sides,
    ) -> Tensor:
        size = batch.size
        log_x1, log_x2 = objective.log_eps_plus_g(log_g, size)
        h = (rewrite(alpha1, log_x1) + rewrite(alpha2, log_x2)).sum() / (2 * size)
        sigma = tau if objective.scaled else torch.ones_like(tau)
        if any(ctx.needs_input_grad):
            # The gradients are made here, while the similarities are at hand; backward only scales them.
            d_e1, d_e2, d_tau = gradients_of_weighted_differences(batch, tau, (-alpha1, -alpha2))
            front = sigma / (2 * size)
            d_tau = front * d_tau + (h if objective.scaled else 0.0) + objective.rho
            d_alpha1, d_alpha2 = front * residual(alpha1, log_x1), front * residual(alpha2, log_x2)
            ctx.save_for_backward(d_e1.mul_(front), d_e2.mul_(front), d_alpha1, d_alpha2, d_tau)
        return sigma * h + objective.rho * tau

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, ...]:
        gradients = (slope * gradient for gradient in ctx.saved_tensors)
        return (*gradients, None, None, None)
