"""The prototypes' alpha and its gradients in closed form, with the prototypes spread over the ranks.

Rank k holds some of the m prototypes and all B anchors. A row's maximum and sum over the prototypes cross the ranks as
B floats a side each; nothing of size m does.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from neuclip_lib.contrast import GlobalBatch, Sides
from neuclip_lib.ranks import ONE, Ranks


def log_or_minus_infinity(x: float) -> float:
    """Natural logarithm, with that of 0."""
    return math.log(x) if x > 0 else -math.inf


def stack_sides(e1: Tensor, e2: Tensor) -> tuple[Tensor, Tensor]:
    """Both sides' anchors as one ``[2, B, d]`` tensor, and their positives ``[B]``."""
    return torch.stack((e1, e2)), (e1 * e2).sum(1)


def prototype_alpha(
    e1: Tensor, e2: Tensor, w: Tensor, tau: Tensor, eps: float, batch: GlobalBatch, m: int | None = None
) -> Sides:
    """Alpha of this rank's anchors, differentiable in ``e1``, ``e2`` and ``tau`` (not in the prototypes).

    Args:
        e1: image anchors of this rank ``[b, d]``, unit rows.
        e2: text anchors ``[b, d]``, unit rows.
        w: this rank's prototypes ``[2, m/W, d]``, unit rows; the first half stands for texts, the second for images.
        tau: temperature: a scalar, or ``[2, B]``.
        eps: constant inside the logarithm.
        batch: all anchors.
        m: prototypes of all ranks together; those of ``w`` if not given.
    """
    return _PrototypeAlpha.apply(e1, e2, tau, w, eps, batch, m or w.shape[1])


class _PrototypeAlpha(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, e1: Tensor, e2: Tensor, tau: Tensor, w: Tensor, eps: float, batch: GlobalBatch, m: int
    ) -> Sides:
        e, positive = stack_sides(batch.e1, batch.e2)
        x = torch.bmm(e / tau[..., None], w.transpose(1, 2))  # [2, B, m/W]
        top = batch.ranks.max(x.amax(2))
        share = x.sub_(top[:, :, None]).exp_()
        shift = positive / tau + math.log(m)
        log_mean = batch.ranks.sum(share.sum(2)).log_().add_(top).sub_(shift)
        alpha = torch.logaddexp(log_mean, log_mean.new_full((), log_or_minus_infinity(eps)))
        rows = batch.rows
        if any(ctx.needs_input_grad):
            # q_ij = share of prototype j in exp(alpha_i); only its moments V and Q are needed later.
            v = torch.bmm(share.mul_((top - shift - alpha).exp_()[:, :, None]), w)
            v = batch.ranks.sum_own_rows(v.transpose(0, 1))  # [b, 2, d]
            mass = torch.exp(log_mean - alpha)[:, rows]
            ctx.save_for_backward(e[:, rows], positive[rows], tau, v.transpose(0, 1), mass)
            ctx.batch = batch
        return alpha[0, rows], alpha[1, rows]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope1: Tensor, slope2: Tensor) -> tuple[Tensor | None, ...]:
        e, positive, tau, v, mass = ctx.saved_tensors
        own_tau = ctx.batch.own_tau(tau)
        slope = torch.stack((slope1, slope2)) / own_tau
        pulled = slope[:, :, None] * v
        weight = slope * mass
        # Both alphas contain -s_ii, so each side's positive partner is pushed by both.
        push = (weight[0] + weight[1])[:, None]
        d_e1, d_e2 = pulled[0] - push * e[1], pulled[1] - push * e[0]
        of_anchors = slope * ((e * v).sum(2) - mass * positive) / own_tau
        if tau.ndim == 0:
            d_tau = -of_anchors.sum()
        else:
            d_tau = torch.zeros_like(tau)
            # The ranks' gradients of the embeddings are averaged; a temperature of an anchor has one owner.
            d_tau[:, ctx.batch.rows] = -of_anchors / ctx.batch.ranks.size
        return d_e1, d_e2, d_tau, None, None, None, None


def prototype_gradient(
    e: Tensor,
    positive: Tensor,
    w_raw: Tensor,
    log_eps_plus_g: Tensor,
    tau: Tensor,
    eps: float,
    out: Tensor | None = None,
    ranks: Ranks = ONE,
    m: int | None = None,
) -> Tensor:
    """Gradient of the loss (scaled by tau) in this rank's stored prototypes, in closed form.

        dL/dW_j = (I - w_j w_j^T)/|W_j| * 1/(2B) sum_i r_i q_ij e_i,     r_i = 1 - exp(-alpha_i)(eps + g_i)

    Args:
        e: anchors of both sides ``[2, B, d]``.
        positive: ``s_ii`` ``[B]``.
        w_raw: stored prototypes of this rank ``[2, m/W, d]``, not normalised.
        log_eps_plus_g: ``[2, B]``; constant over the updates on one batch.
        tau: temperature: a scalar, or ``[2, B]``.
        eps: constant inside the logarithm.
        out: buffer ``[2, B, m/W]`` for the logits.
        ranks: over which the prototypes are spread: two exchanges of 2B floats.
        m: prototypes of all ranks together; those of ``w_raw`` if not given.

    Returns:
        ``[2, m/W, d]``, whole: nothing is left to be averaged over ranks.
    """
    m = m or w_raw.shape[1]
    length = torch.linalg.vector_norm(w_raw, dim=2, keepdim=True)
    w = w_raw / length
    wide = tau[..., None]
    x = torch.bmm(e / wide, w.transpose(1, 2), out=out) if out is not None else torch.bmm(e / wide, w.transpose(1, 2))
    # The B x m matrix sees only a maximum, an exponential and a sum; everything else acts on its rows.
    top = ranks.max(x.amax(2, keepdim=True))
    share = x.sub_(top).exp_()
    top = top - (positive / tau + math.log(m))[..., None]
    log_mean = ranks.sum(share.sum(2, keepdim=True)).log_().add_(top)
    alpha = torch.logaddexp(log_mean, log_mean.new_full((), log_or_minus_infinity(eps)))
    r = torch.expm1(_bounded(log_eps_plus_g[:, :, None] - alpha, wide)).neg_()
    row = torch.exp(top - alpha).mul_(r).div_(2 * e.shape[1])
    g = torch.bmm(share.transpose(1, 2), e * row)
    return g.sub_((g * w).sum(2, keepdim=True) * w).div_(length)


def _bounded(gap: Tensor, tau: Tensor) -> Tensor:
    """``log(eps + g) - alpha`` without what the number format cannot carry.

    A gap within the rounding of ``s/tau`` is none: AdaGrad would turn its sign into full steps. Above a third of the
    format's range (29 in float32; a weight of 1e12) AdaGrad's squares overflow and the column would never move again.
    """
    format = torch.finfo(gap.dtype)
    gap = gap.clamp_(max=math.log(format.max) / 3)
    return gap.mul_(gap.abs() > 8 * format.eps / tau)
