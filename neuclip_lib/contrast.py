"""From similarities to log_g: the stable, masked log-mean-exp over negatives, on one process or many.

Symbols (the same everywhere): ``e1_i``, ``e2_i`` unit image and text embeddings, ``s_ij = e1_i . e2_j``, ``B`` pairs
in the global batch, ``tau`` the temperature, and per anchor, positive excluded,

    g1_i = 1/(B-1) sum_{j != i} exp((s_ij - s_ii)/tau)     image anchor, texts vary
    g2_i = 1/(B-1) sum_{j != i} exp((s_ji - s_ii)/tau)     text anchor, images vary

On several ranks each holds ``b = B/W`` anchors with gradient and all B embeddings without. A rank computes its rows of
the gradient exactly: what they do as anchors, and what they do as the other ranks' negatives.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from neuclip_lib.ranks import ONE, Ranks

Sides = tuple[Tensor, Tensor]
"""One tensor for the image anchors and one for the text anchors."""

BLOCK_ELEMENTS = 1 << 20
"""Similarities handled at a time: a block of rows with its temporaries stays small beside the B x B matrix."""


@dataclass
class GlobalBatch:
    """The detached embeddings of all pairs in one global batch, in the same order on every rank.

    Args:
        e1: image embeddings, unit rows ``[B, d]``.
        e2: text embeddings, unit rows ``[B, d]``.
        index: stable sample index of each pair ``[B]``, for normalizers that keep state per sample.
        keep_similarities: hold the similarities of this rank's anchors so that they are computed once a step; without
            it they are recomputed block by block and memory stays linear in B.
        ranks: the processes that share the batch.
        rows: this rank's anchors, ``b`` of the B; all of them if not given.

    Raises:
        ValueError: when the shapes disagree or there are fewer than 2 pairs (a pair alone has no negatives).
    """

    e1: Tensor
    e2: Tensor
    index: Tensor | None = None
    keep_similarities: bool = True
    ranks: Ranks = ONE
    rows: slice = field(default_factory=lambda: slice(None))
    _kept: dict[int, Tensor] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.e1.ndim != 2 or self.e1.shape != self.e2.shape:
            raise ValueError(
                f"image and text embeddings must both be [B, d]; got {tuple(self.e1.shape)} and {tuple(self.e2.shape)}"
            )
        if self.size < 2:
            raise ValueError(f"a contrastive batch needs at least 2 pairs, got {self.size}: one pair has no negatives")
        if self.index is not None and self.index.shape != (self.size,):
            raise ValueError(f"index must be [{self.size}], one integer a pair; got {tuple(self.index.shape)}")
        self.e1, self.e2 = self.e1.detach(), self.e2.detach()
        low, high, _ = self.rows.indices(self.size)
        self.rows = slice(low, high)

    @property
    def size(self) -> int:
        """Number of pairs B."""
        return self.e1.shape[0]

    @property
    def own_size(self) -> int:
        """Number of this rank's anchors b."""
        return self.rows.stop - self.rows.start

    @property
    def is_whole(self) -> bool:
        """Whether this rank's anchors are all anchors."""
        return self.own_size == self.size

    @property
    def positives(self) -> Tensor:
        """The matching pairs' similarities ``s_ii`` ``[B]``."""
        return (self.e1 * self.e2).sum(1)

    def own(self, x: Tensor) -> Tensor:
        """This rank's anchors of ``[B, ...]``."""
        return x[self.rows]

    def whole(self, sides: Sides) -> Sides:
        """Every rank's ``[b]`` a side as ``[B]`` a side, without gradient: one gather of 2b floats."""
        if self.is_whole:
            return sides[0].detach(), sides[1].detach()
        both = self.ranks.gather(torch.stack(sides, 1).detach())
        return both[:, 0], both[:, 1]

    def own_tau(self, tau: Tensor) -> Tensor:
        """The temperature of this rank's anchors: ``[]`` as it is, ``[2, B]`` as ``[2, b]``."""
        return tau if tau.ndim == 0 else tau[:, self.rows]

    def blocks(self, side: int) -> Iterator[tuple[slice, Tensor]]:
        """Rows of the similarities of this rank's anchors, with the positives at minus infinity.

        Args:
            side: 0 for image anchors against all texts, 1 for text anchors against all images.

        Yields:
            (places among this rank's anchors, ``[rows, B]``, not to be written to).
        """
        height = max(1, BLOCK_ELEMENTS // self.size)
        if self.keep_similarities and side not in self._kept:
            self._kept[side] = self._masked(side, slice(0, self.own_size))
        for low in range(0, self.own_size, height):
            rows = slice(low, min(low + height, self.own_size))
            yield rows, self._kept[side][rows] if self.keep_similarities else self._masked(side, rows)

    def _masked(self, side: int, rows: slice) -> Tensor:
        anchors, others = (self.e1, self.e2) if side == 0 else (self.e2, self.e1)
        first = self.rows.start + rows.start
        s = anchors[first : self.rows.start + rows.stop] @ others.T
        # Masked before any reduction: subtracting the positive afterwards cancels all digits when it dominates.
        s.diagonal(first).fill_(-math.inf)
        return s


def log_mean_exp_over_negatives(e1: Tensor, e2: Tensor, batch: GlobalBatch, tau: Tensor) -> Sides:
    """``log_g`` of this rank's anchors, differentiable in the embeddings and the temperature.

    Args:
        e1: image embeddings ``[b, d]`` with gradient, this rank's rows of ``batch.e1``.
        e2: text embeddings ``[b, d]`` with gradient, this rank's rows of ``batch.e2``.
        batch: all embeddings, detached.
        tau: temperature: a scalar, or ``[2, B]`` for one a side and anchor, the same on every rank.

    Returns:
        ``(log_g1, log_g2)``, each ``[b]``. The backward costs two products of B x B x d, and only if it is used.
    """
    return _LogMeanExp.apply(e1, e2, tau, batch)


class _LogMeanExp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, e1: Tensor, e2: Tensor, tau: Tensor, batch: GlobalBatch) -> Sides:
        sides = _log_sums_of_a_square(batch, tau) if batch.is_whole else _log_sums(batch, tau)
        shift = batch.own(batch.positives) / batch.own_tau(tau) + math.log(batch.size - 1)
        log_g1, log_g2 = torch.stack(sides) - shift
        ctx.batch = batch
        ctx.save_for_backward(tau, log_g1, log_g2)
        return log_g1, log_g2

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope1: Tensor, slope2: Tensor) -> tuple[Tensor | None, ...]:
        tau, log_g1, log_g2 = ctx.saved_tensors
        # d log_g1_i / d s_ij = softmax over negatives / tau: the weights exp(d_ij - log_g1_i)/(B-1) of the mean.
        gradients = gradients_of_weighted_differences(ctx.batch, tau, (-log_g1, -log_g2), (slope1, slope2))
        return (*gradients, None)


def _log_sums_of_a_square(batch: GlobalBatch, tau: Tensor) -> Sides:
    """Log of the sums over negatives, both sides from one pass over the similarities."""
    inverse = (1 / tau).expand(2, batch.size)
    of_rows = []
    of_columns = torch.full_like(batch.positives, -math.inf)
    for rows, s in batch.blocks(0):
        x = s * inverse[0, rows, None]
        of_rows.append(torch.logsumexp(x, 1))
        if tau.ndim:
            x = s * inverse[1]
        of_columns = torch.logaddexp(of_columns, torch.logsumexp(x, 0))
    return torch.cat(of_rows), of_columns


def _log_sums(batch: GlobalBatch, tau: Tensor) -> Sides:
    """The same for some of the anchors: rows of two rectangles, no sum crosses ranks."""
    inverse = (1 / batch.own_tau(tau)).expand(2, batch.own_size)[:, :, None]
    first, second = (
        torch.cat([torch.logsumexp(s * inverse[side, rows], 1) for rows, s in batch.blocks(side)]) for side in (0, 1)
    )
    return first, second


def gradients_of_weighted_differences(
    batch: GlobalBatch, tau: Tensor, log_weights: Sides, slopes: Sides | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of ``F = sum_i slope1_i w1_i g1_i + slope2_i w2_i g2_i`` with the weights ``w`` held constant.

    Every contrastive loss of the family has this gradient in its embeddings; the methods differ in the weights. With
    ``P1_ij = w1_i exp((s_ij - s_ii)/tau)/(B-1)``, ``P2_ij`` the same for text anchor j, and zero diagonals,

        dE1 = [ (P1 + P2) E2 - D * E2 ] / tau,    dE2 = [ (P1 + P2)^T E1 - D * E1 ] / tau,
        D_i = sum_j P1_ij + sum_j P2_ji,          dtau = -<E1, dE1> / tau.

    A temperature per anchor stands inside P in place of the common divisor.

    Args:
        batch: the global batch.
        tau: temperature: a scalar, or ``[2, B]``.
        log_weights: ``log w`` of this rank's anchors, each ``[b]``; kept in logs because ``exp(d)`` alone overflows.
        slopes: factors of both sides, each ``[b]`` and of any sign; ones if not given.

    Returns:
        ``dE1 [b, d], dE2 [b, d]``: this rank's rows of the gradient of the sum over all anchors, as the other ranks'
        weights travel (2b floats). ``dtau``: over this rank's anchors alone, the column part's temperature being a
        constant; it is ``[]``, or ``[2, B]`` with zeros for the other ranks' anchors. Two products of B x B x d on one
        process, four of b x B x d with the similarities on several.
    """
    inverse = (1 / tau).expand(2, batch.size)
    shift = batch.positives * inverse + math.log(batch.size - 1)
    log_p = torch.stack(batch.whole(log_weights)) - shift  # [2, B], added to s/tau inside P
    if tau.ndim:
        log_p = log_p + inverse.log()
    factors = None if slopes is None else torch.stack(batch.whole(slopes))
    if batch.is_whole:
        d1, d2, sums, moments = _products_of_a_square(batch, log_p, inverse, factors, bool(tau.ndim))
    else:
        d1, d2, sums, moments = _products(batch, log_p, inverse, factors, bool(tau.ndim))
    e1, e2 = batch.own(batch.e1), batch.own(batch.e2)
    drop = (sums[0] + sums[1])[:, None]
    d1.addcmul_(drop, e2, value=-1)
    d2.addcmul_(drop, e1, value=-1)
    if tau.ndim == 0:
        d1.div_(tau)
        d2.div_(tau)
        # Over all ranks each anchor counts once a side; a rank's own share of this sum is another, the mean is not.
        return d1, d2, -(e1 * d1).sum() / tau
    d_tau = torch.zeros_like(tau)
    d_tau[:, batch.rows] = (sums * batch.own(batch.positives) - moments) / batch.own_tau(tau)
    return d1, d2, d_tau


Products = tuple[Tensor, Tensor, Tensor, Tensor]
"""(P1 + P2) E2 and (P1 + P2)^T E1, ``[b, d]``; the own anchors' sums of P and of P s, ``[2, b]``."""


def _weights(s: Tensor, log_p: Tensor, inverse: Tensor, factor: Tensor | None) -> Tensor:
    p = torch.addcmul(log_p, s, inverse).exp_()
    return p if factor is None else p.mul_(factor)


def _moment(p: Tensor, s: Tensor, dim: int) -> Tensor:
    """Sum of p s; where s is minus infinity, p is 0."""
    return (p * s.clamp_min(torch.finfo(s.dtype).min)).sum(dim)


def _products_of_a_square(
    batch: GlobalBatch, log_p: Tensor, inverse: Tensor, factors: Tensor | None, moments_too: bool
) -> Products:
    """One pass over B x B: the same weights serve the rows of one side and the columns of the other."""
    d1, d2 = torch.empty_like(batch.e1), torch.zeros_like(batch.e2)
    sums, moments = d1.new_zeros(2, batch.size), d1.new_zeros(2, batch.size)
    for rows, s in batch.blocks(0):
        p1 = _weights(
            s, log_p[0, rows, None], inverse[0, rows, None], None if factors is None else factors[0, rows, None]
        )
        p2 = _weights(s, log_p[1], inverse[1], None if factors is None else factors[1])
        sums[0, rows] = p1.sum(1)
        sums[1] += p2.sum(0)
        if moments_too:
            moments[0, rows] = _moment(p1, s, 1)
            moments[1] += _moment(p2, s, 0)
        m = p1.add_(p2)
        torch.mm(m, batch.e2, out=d1[rows])
        d2.addmm_(m.T, batch.e1[rows])
    return d1, d2, sums, moments


def _products(
    batch: GlobalBatch, log_p: Tensor, inverse: Tensor, factors: Tensor | None, moments_too: bool
) -> Products:
    """Two rectangles: own anchors against everything, weighted as anchors and, by the others' weights, as negatives."""
    d = [torch.empty_like(batch.own(batch.e1)) for _ in range(2)]
    sums, moments = d[0].new_empty(2, batch.own_size), d[0].new_empty(2, batch.own_size)
    for side, others in ((0, batch.e2), (1, batch.e1)):
        own_p, own_inverse = log_p[side, batch.rows, None], inverse[side, batch.rows, None]
        own_factor = None if factors is None else factors[side, batch.rows, None]
        far = 1 - side
        for rows, s in batch.blocks(side):
            p = _weights(s, own_p[rows], own_inverse[rows], None if own_factor is None else own_factor[rows])
            sums[side, rows] = p.sum(1)
            if moments_too:
                moments[side, rows] = _moment(p, s, 1)
            p += _weights(s, log_p[far], inverse[far], None if factors is None else factors[far])
            torch.mm(p, others, out=d[side][rows])
    return d[0], d[1], sums, moments
