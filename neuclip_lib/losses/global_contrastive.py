"""The global contrastive loss after the conjugate rewrite: one loss for every normalizer.

    L = 1/(2B) sum_i sigma [ h1_i + h2_i ] + rho tau,     h = exp(-alpha)(eps + g) + alpha - 1

with ``sigma = tau`` (GCL, RGCL-g; RGCL where every anchor has its own), ``sigma`` = tau held constant (AmorLIP) or
``sigma = 1``. The papers write the sum of both sides and ``2 rho tau``; we take half of that, so gradients are on the
scale of averaged cross-entropy.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from neuclip_lib.conjugate import residual, rewrite
from neuclip_lib.contrast import GlobalBatch, Sides, gradients_of_weighted_differences, log_mean_exp_over_negatives

Factor = Literal["one", "tau", "held tau"]


@dataclass(frozen=True)
class TauRule:
    """How published code departs from the loss's own derivative in tau; not used by the exact methods.

    Args:
        head: what stands for h in ``dL/dtau``: ``h``, or ``alpha``, the mean of log u.
        middle: what the term ``e^-alpha dg/dtau`` is multiplied by.
        encoder_without_tau: leave the factor tau out of the encoders' gradient, not out of tau's.
    """

    head: Literal["h", "alpha"] = "h"
    middle: float = 1.0
    encoder_without_tau: bool = False


EXACT = TauRule()


@dataclass(frozen=True)
class Objective:
    """What is added to g, and what stands in front of the logarithm.

    Args:
        eps: constant inside the logarithm; ``None`` means ``1/(B-1)``, which is InfoNCE: the positive is one of the
            terms of the denominator.
        factor: sigma: ``tau`` (GCL, RGCL, RGCL-g), ``one``, or ``held tau``, which tau's gradient does not see.
        rho: weight of the ``+ rho tau`` that keeps a learned temperature from running to a bound.
        tau_rule: the derivative in tau; exact unless published behaviour is wanted.
    """

    eps: float | None
    factor: Factor
    rho: float = 0.0
    tau_rule: TauRule = EXACT

    def __post_init__(self) -> None:
        if self.eps is not None and not (math.isfinite(self.eps) and self.eps >= 0):
            raise ValueError(f"eps must be finite and not negative, or None for 1/(B-1); got {self.eps}")
        if self.factor not in ("one", "tau", "held tau"):
            raise ValueError(f"factor must be 'one', 'tau' or 'held tau', got {self.factor!r}")

    def log_eps(self, size: int) -> float:
        """``log eps`` for a global batch of ``size`` pairs; minus infinity for ``eps = 0``."""
        if self.eps is None:
            return -math.log(size - 1)
        return math.log(self.eps) if self.eps > 0 else -math.inf

    def log_eps_plus_g(self, log_g: Sides, size: int) -> Sides:
        """``log(eps + g)`` of both sides, the alpha that is exact for this batch."""
        log_eps = log_g[0].new_full((), self.log_eps(size))
        return torch.logaddexp(log_eps, log_g[0]), torch.logaddexp(log_eps, log_g[1])

    def sigma(self, tau: Tensor) -> Tensor:
        """The factor in front of h, the shape of ``tau``."""
        return torch.ones_like(tau) if self.factor == "one" else tau

    def value(self, alpha: Sides, log_g: Sides, tau: Tensor, size: int) -> Tensor:
        """The loss itself from alpha and log_g, by plain autograd (no closed forms): for reading and checking."""
        log_x = self.log_eps_plus_g(log_g, size)
        sigma = self.sigma(tau if self.factor == "tau" else tau.detach())
        h = torch.stack((rewrite(alpha[0], log_x[0]), rewrite(alpha[1], log_x[1])))
        return (sigma * h).mean() + self.rho * tau.mean()


def global_contrastive_loss(
    e1: Tensor,
    e2: Tensor,
    alpha: Sides,
    batch: GlobalBatch,
    tau: Tensor,
    objective: Objective,
    log_g: Sides,
    batch_part: Sides | None = None,
) -> Tensor:
    """The loss, with closed-form gradients in both embeddings, both alphas and tau.

    Three matrix products of B x B x d in all with ``log_mean_exp_over_negatives``: the similarities, and the two of the
    gradient. On several ranks four of b x B x d.

    Args:
        e1: image embeddings of this rank's anchors ``[b, d]``, unit rows, with gradient.
        e2: text embeddings ``[b, d]``, unit rows, with gradient.
        alpha: log-normalizers of image and text anchors, each ``[b]``; constants, or differentiable in anything.
        batch: all embeddings, detached.
        tau: temperature: a scalar, or ``[2, B]`` for one a side and anchor.
        objective: eps, factor, rho.
        log_g: what ``log_mean_exp_over_negatives(e1, e2, batch, tau)`` gave; only its values are used.
        batch_part: derivative of alpha in the batch's own ``log(eps + g)``, each ``[b]``, where a stabiliser mixes it
            in; it is followed here, so alpha must be given without it. None for zero.

    Returns:
        A scalar that can be differentiated once. On several ranks it is this rank's share: the mean over ranks is the
        loss, and so is the mean of the gradients of whatever the ranks have in common (encoders, scalar tau). The
        gradient of a ``[2, B]`` tau is that of the loss itself for this rank's anchors, zero for the others.
    """
    held = (log_g[0].detach(), log_g[1].detach())
    return _GlobalContrastive.apply(e1, e2, alpha[0], alpha[1], tau, batch, objective, held, batch_part)


def info_nce(e1: Tensor, e2: Tensor, tau: Tensor) -> Tensor:
    """InfoNCE, the loss of CLIP: the mean of both cross-entropies, as the family's member with ``eps = 1/(B-1)``.

    ``log(1 + (B-1) g) = log(B-1) + log(1/(B-1) + g)``. Arguments as in :func:`global_contrastive_loss`.
    """
    batch, objective = GlobalBatch(e1, e2), Objective(eps=None, factor="one")
    log_g = log_mean_exp_over_negatives(e1, e2, batch, tau)
    exact = objective.log_eps_plus_g((log_g[0].detach(), log_g[1].detach()), batch.size)
    return global_contrastive_loss(e1, e2, exact, batch, tau, objective, log_g) + math.log(batch.size - 1)


def log_weights(alpha: Sides, log_eps_plus_g: Sides, batch_part: Sides | None) -> Sides:
    """``log omega``: the weight of each anchor's ``grad g``.

    ``exp(-alpha)``; where alpha follows the batch's own ``log(eps + g)`` in part, ``q = batch_part``, the loss's slope
    in that adds up to ``omega = (1 - q) exp(-alpha) + q/(eps + g)``.
    """
    if batch_part is None:
        return -alpha[0], -alpha[1]
    first, second = (
        torch.logaddexp(torch.log1p(-q) - a, torch.log(q) - x)
        for a, x, q in zip(alpha, log_eps_plus_g, batch_part, strict=True)
    )
    return first, second


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
        batch_part: Sides | None,
    ) -> Tensor:
        log_x = objective.log_eps_plus_g(log_g, batch.size)
        h = torch.stack((rewrite(alpha1, log_x[0]), rewrite(alpha2, log_x[1])))  # [2, b]
        own_tau = batch.own_tau(tau)
        sigma = objective.sigma(own_tau)
        if any(ctx.needs_input_grad):
            # The gradients are made here, while the similarities are at hand; backward only scales them.
            weights = log_weights((alpha1, alpha2), log_x, batch_part)
            alpha = torch.stack((alpha1, alpha2))
            *d_e, d_tau = _encoders_and_tau(batch, tau, objective, weights, h, alpha)
            d_alpha = sigma * torch.stack((residual(alpha1, log_x[0]), residual(alpha2, log_x[1])))
            ctx.save_for_backward(*d_e, *d_alpha.mul_(_front(batch)), d_tau)
        return (sigma * h).sum() * _front(batch) + objective.rho * own_tau.mean()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, ...]:
        gradients = (slope * gradient for gradient in ctx.saved_tensors)
        return (*gradients, None, None, None, None)


def _front(batch: GlobalBatch) -> float:
    """``W/(2B)``: what stands before the sum over a rank's anchors, since the ranks' gradients are averaged."""
    return batch.ranks.size / (2 * batch.size)


def _encoders_and_tau(
    batch: GlobalBatch, tau: Tensor, objective: Objective, weights: Sides, h: Tensor, alpha: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients in e1, e2 and tau with alpha held; ``h`` and ``alpha`` are ``[2, b]``."""
    rule, own_tau = objective.tau_rule, batch.own_tau(tau)
    sigma = objective.sigma(own_tau)
    in_encoders = torch.ones_like(sigma) if rule.encoder_without_tau else sigma
    # The factor stands inside the weights: it may be the anchor's own, and nothing of size B x d is scaled afterwards.
    log_factor = (in_encoders * _front(batch)).log().expand(2, batch.own_size)
    weights = (weights[0] + log_factor[0], weights[1] + log_factor[1])
    d_e1, d_e2, middle = gradients_of_weighted_differences(batch, tau, weights)
    head = torch.zeros_like(h)
    if objective.factor == "tau":
        head = h if rule.head == "h" else alpha
    middle = middle if tau.ndim == 0 else middle[:, batch.rows]
    middle = rule.middle * middle * sigma / in_encoders
    if tau.ndim == 0:
        return d_e1, d_e2, _front(batch) * head.sum() + middle + objective.rho
    d_tau = torch.zeros_like(tau)
    # A tau of its own has one owner: nothing averages its gradient over ranks.
    d_tau[:, batch.rows] = (head + objective.rho) / (2 * batch.size) + middle / batch.ranks.size
    return d_e1, d_e2, d_tau
