"""The prototypes' alpha and its gradients in closed form, with the prototypes spread over the ranks.

Rank k holds some of the m prototypes and all B anchors. A row's maximum and sum over the prototypes cross the ranks as
B floats a side each; nothing of size m does.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

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


@dataclass
class Room:
    """Memory that updates use again and again: on a CPU fresh memory costs more than what is written into it.

    Args:
        logits: ``[2, B, m/W]``.
        pull: ``[2, m/W, d]``, the gradient in the unit prototypes.
        ones: ``[2 m/W, 1]``, their lengths.
    """

    logits: Tensor
    pull: Tensor
    ones: Tensor

    @staticmethod
    def like(e: Tensor, own: int) -> Room:
        """For anchors ``e [2, B, d]`` and ``own`` prototypes of this rank."""
        return Room(e.new_empty(2, e.shape[1], own), e.new_empty(2, own, e.shape[2]), e.new_ones(2 * own, 1))

    def fits(self, e: Tensor, own: int) -> bool:
        """Whether it is for these sizes."""
        return self.logits.shape == (2, e.shape[1], own) and self.pull.shape[2] == e.shape[2]


class _Block(NamedTuple):
    """The parts of the anchors' tensors that belong to some rows of some sides."""

    scaled: Tensor
    logits: Tensor
    front: Tensor
    side: slice
    rows: slice


class Updates:
    """The updates of the prototypes on one batch: what they have in common is made once.

    Args:
        e: anchors of both sides ``[2, B, d]``.
        positive: ``s_ii`` ``[B]``.
        log_eps_plus_g: ``[2, B]``; constant over the updates.
        tau: temperature: a scalar, or ``[2, B]``.
        eps: constant inside the logarithm.
        m: prototypes of all ranks together.
        room: memory for the temporaries.
        ranks: over which the prototypes are spread: two exchanges of 2B floats an update.
    """

    def __init__(
        self,
        e: Tensor,
        positive: Tensor,
        log_eps_plus_g: Tensor,
        tau: Tensor,
        eps: float,
        m: int,
        room: Room,
        ranks: Ranks = ONE,
    ) -> None:
        self.room, self.ranks = room, ranks
        wide, format = tau[..., None], torch.finfo(e.dtype)
        self.scaled, self.front = e / wide, e / (-2 * e.shape[1])  # [2, B, d]
        self.shift = (positive / tau + math.log(m))[..., None]  # [B, 1] or [2, B, 1]
        self.log_x = log_eps_plus_g[:, :, None]
        self.log_eps = e.new_full((), log_or_minus_infinity(eps))
        # A gap log(eps + g) - alpha within the rounding of s/tau is none: AdaGrad would turn its sign into full steps.
        # Above half of the format's range (44 in float32) AdaGrad's squares overflow and the column would never move
        # again; a third (29, a weight of 1e12) leaves room for their sum.
        self.least, self.most = 8 * format.eps / wide, math.log(format.max) / 3
        self.blocks = [
            _Block(self.scaled[at], room.logits[at], self.front[at], *at) for at in _blocks(room.logits, e.shape[2])
        ]

    def gradient(self, w_raw: Tensor) -> Tensor:
        """Gradient of the loss (scaled by tau) in this rank's stored prototypes, in closed form.

            dL/dW_j = (I - w_j w_j^T)/|W_j| * 1/(2B) sum_i r_i q_ij e_i,     r_i = 1 - exp(-alpha_i)(eps + g_i)

        Args:
            w_raw: stored prototypes of this rank ``[2, m/W, d]``, not normalised.

        Returns:
            ``[2, m/W, d]``, whole: nothing is left to be averaged over ranks.
        """
        # What torch's weight_norm calls: unit rows, and below the gradient through them, in one pass each.
        raw = w_raw.reshape(-1, w_raw.shape[2])
        w, length = torch.ops.aten._weight_norm_interface(raw, self.room.ones, 0)
        columns = w.view_as(w_raw).transpose(1, 2)
        tops: list[Tensor] = []
        totals: list[Tensor] = []
        # The B x m matrix sees only a maximum, an exponential and a sum; everything else acts on its rows.
        for block in self.blocks:
            x = torch.bmm(block.scaled, columns[block.side], out=block.logits)
            tops.append(x.amax(2, keepdim=True))
            totals.append(x.sub_(tops[-1]).exp_().sum(2, keepdim=True))
        top, total = _joined(tops), _joined(totals)
        own_top = top - self.shift
        if self.ranks.size > 1:
            own, top = top, self.ranks.max(top.clone())
            total.mul_(own.sub_(top).exp_())
        log_mean = self.ranks.sum(total).log_().add_(top - self.shift)
        alpha = torch.logaddexp(log_mean, self.log_eps)
        gap = (self.log_x - alpha).clamp_(max=self.most)
        minus_r = gap.mul_(gap.abs() > self.least).expm1_()
        row = own_top.sub_(alpha).exp_().mul_(minus_r)
        g = self.room.pull
        for block in self.blocks:
            share, pull = block.logits.transpose(1, 2), block.front * row[block.side, block.rows]
            if block.rows.start == 0:
                torch.bmm(share, pull, out=g[block.side])
            else:
                g[block.side].baddbmm_(share, pull)
        projected, _ = torch.ops.aten._weight_norm_interface_backward(g.view_as(raw), raw, self.room.ones, length, 0)
        return projected.view_as(w_raw)


CACHE = 2**20
"""Bytes of the B x m matrix that a CPU works on at a time: about half of one core's second cache."""


def _blocks(logits: Tensor, dim: int) -> list[tuple[slice, slice]]:
    """Sides and rows to take together: all at once, or on a CPU as many rows as stay in its cache."""
    sides, size, m = logits.shape
    row = m * logits.element_size()
    if logits.device.type != "cpu" or sides * size * row <= CACHE:
        return [(slice(0, sides), slice(0, size))]
    # Every block reads all prototypes, m d numbers: with fewer than d/2 rows that costs more than the cache saves.
    rows = max(64, CACHE // row, dim // 2)
    return [
        (slice(side, side + 1), slice(start, min(start + rows, size)))
        for side in range(sides)
        for start in range(0, size, rows)
    ]


def _joined(parts: list[Tensor]) -> Tensor:
    """The rows of :func:`_blocks` one below the other again, as ``[2, B, 1]``."""
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1).view(2, -1, 1)


@functools.cache
def compiled_gradient() -> Callable[[Updates, Tensor], Tensor]:
    """:meth:`Updates.gradient` as a few fused kernels and two products; made on the first call for each size."""
    return torch.compile(Updates.gradient, fullgraph=True, dynamic=False)


def prototype_gradient(
    e: Tensor, positive: Tensor, w_raw: Tensor, log_eps_plus_g: Tensor, tau: Tensor, eps: float
) -> Tensor:
    """One gradient on one process; arguments as in :class:`Updates`, ``w_raw`` as in :meth:`Updates.gradient`."""
    m = w_raw.shape[1]
    return Updates(e, positive, log_eps_plus_g, tau, eps, m, Room.like(e, m)).gradient(w_raw)
