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

from neuclip_lib.block_sums import Shares, exponentials, log_sum, moment
from neuclip_lib.ranks import ONE, Ranks

Sides = tuple[Tensor, Tensor]
"""One tensor for the image anchors and one for the text anchors."""

BLOCK_ELEMENTS = 1 << 18
"""Similarities handled at a time on the CPU: a block of rows and two temporaries stay in a core's own cache."""
GPU_BLOCKS = 64
"""How many times as many on other devices, where it is the number of launches that counts."""


def block_rows(count: int, width: int, device: torch.device) -> Iterator[slice]:
    """Cut ``count`` rows of ``width`` similarities into blocks."""
    elements = BLOCK_ELEMENTS if device.type == "cpu" else BLOCK_ELEMENTS * GPU_BLOCKS
    height = max(1, elements // width)
    for low in range(0, count, height):
        yield slice(low, min(low + height, count))


@dataclass
class GlobalBatch:
    """The detached embeddings of all pairs in one global batch, in the same order on every rank.

    Args:
        e1: image embeddings, unit rows ``[B, d]``.
        e2: text embeddings, unit rows ``[B, d]``.
        index: stable sample index of each pair ``[B]``, for normalizers that keep state per sample.
        keep_similarities: hold what is made of the similarities of this rank's anchors (two matrices of b x B) so that
            they are computed once a step; without it they are recomputed block by block and memory is linear in B.
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
    _shares: Shares | None = field(default=None, init=False, repr=False)

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
            (places among this rank's anchors, ``[rows, B]``): not to be written to, and gone with the next unless kept.
        """
        every = list(block_rows(self.own_size, self.size, self.e1.device))
        if side in self._kept:
            yield from ((rows, self._kept[side][rows]) for rows in every)
            return
        # Made block by block in either case: what follows reads them while they are in the cache.
        room = self.e1.new_empty(self.own_size if self.keep_similarities else every[0].stop, self.size)
        for rows in every:
            place = rows if self.keep_similarities else slice(0, rows.stop - rows.start)
            yield rows, self._masked(side, rows, room[place])
        if self.keep_similarities:
            self._kept[side] = room

    def _masked(self, side: int, rows: slice, out: Tensor) -> Tensor:
        anchors, others = (self.e1, self.e2) if side == 0 else (self.e2, self.e1)
        first = self.rows.start + rows.start
        s = torch.mm(self.own(anchors)[rows], others.T, out=out)
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
        shift = batch.own(batch.positives) / batch.own_tau(tau) + math.log(batch.size - 1)
        log_g1, log_g2 = _log_sums(batch, tau) - shift
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


def _log_sums(batch: GlobalBatch, tau: Tensor) -> Tensor:
    """Log of the sums over negatives of this rank's anchors ``[2, b]``; none crosses ranks."""
    every = list(block_rows(batch.own_size, batch.size, batch.e1.device))
    if batch.is_whole and batch.keep_similarities and tau.ndim == 0 and not tau.is_inference():
        batch._shares = Shares(batch.e1, batch.e2, tau, every)
        return batch._shares.log_sums
    inverse, room = (1 / tau).expand(2, batch.size).contiguous(), batch.e1.new_empty(every[0].stop, batch.size)
    if not batch.is_whole:
        own = inverse[:, batch.rows, None]
        sides = ([log_sum(s, own[side, rows], 1, room) for rows, s in batch.blocks(side)] for side in (0, 1))
        return torch.stack([torch.cat(side) for side in sides])
    of_rows, of_columns = [], []
    for rows, s in batch.blocks(0):  # both sides from one pass
        of_rows.append(log_sum(s, inverse[0, rows, None], 1, room))
        of_columns.append(log_sum(s, inverse[1], 0, room))
    return torch.stack((torch.cat(of_rows), torch.stack(of_columns).logsumexp(0)))


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
        weights travel (2b floats). ``dtau``: ``[2, B]``, of this rank's anchors, zero for the others'; or ``[]``, a
        share whose sum over ranks is the derivative (each rank's own is not that of its anchors). Two products of
        B x B x d on one process, four of b x B x d with the similarities on several.
    """
    inverse = (1 / tau).expand(2, batch.size).contiguous()
    shift = batch.positives * inverse + math.log(batch.size - 1)
    # [2, B], added to s/tau inside P; the divisor tau stands inside too, where each anchor may have its own.
    log_p = torch.stack(batch.whole(log_weights)) - shift + inverse.log()
    factors = None if slopes is None else torch.stack(batch.whole(slopes))
    d1, d2, of_anchors = _products(batch, log_p, inverse, factors, tau)
    if tau.ndim == 0:
        # Over all ranks each anchor counts once a side; a rank's own share of this sum is another, the mean is not.
        return d1, d2, -(batch.own(batch.e1) * d1).sum() / tau
    d_tau = torch.zeros_like(tau)
    sums, moments = of_anchors
    d_tau[:, batch.rows] = (sums * batch.own(batch.positives) - moments) / batch.own_tau(tau)
    return d1, d2, d_tau


def _products(
    batch: GlobalBatch, log_p: Tensor, inverse: Tensor, factors: Tensor | None, tau: Tensor
) -> tuple[Tensor, Tensor, Sides]:
    """``dE1``, ``dE2`` ``[b, d]``; of the own anchors the sums of P and of P s ``[2, b]``, where each has its own tau.

    D is made of the very weights that stand in the product: embeddings of an untrained model nearly coincide, and the
    two parts cancel.
    """
    d = torch.zeros_like(batch.own(batch.e1)), torch.zeros_like(batch.own(batch.e2))
    sums, moments = (d[0].new_zeros(2, batch.own_size) for _ in range(2))
    if batch._shares is not None and batch._shares.are_for(tau):
        for rows, m in batch._shares.weights(log_p, factors):
            torch.mm(m, batch.e2, out=d[0][rows])
            d[1].addmm_(m.T, batch.e1[rows])
        return *d, (sums, moments)
    height = next(block_rows(batch.own_size, batch.size, batch.e1.device)).stop
    room = batch.e1.new_empty(2, height, batch.size)  # used again and again: cold memory costs more than an exponential

    def part(s: Tensor, side: int, rows: slice | tuple[slice, None], out: Tensor) -> Tensor:
        p = exponentials(s, inverse[side][rows], log_p[side][rows], out)
        return p if factors is None else p.mul_(factors[side][rows])

    # On one process the same weights serve the rows of one side and the columns of the other. On several there are two
    # rectangles: own anchors against everything, weighted as anchors and, by the others' weights, as negatives.
    for side in (0,) if batch.is_whole else (0, 1):
        far = 1 - side
        for rows, s in batch.blocks(side):
            own = slice(batch.rows.start + rows.start, batch.rows.start + rows.stop)
            p, q = part(s, side, (own, None), room[0]), part(s, far, slice(None), room[1])
            sums[side, rows] = p.sum(1)
            if tau.ndim:
                moments[side, rows] = moment(p, s, 1)
            if batch.is_whole:
                sums[far] += q.sum(0)
                moments[far] += moment(q, s, 0) if tau.ndim else 0
            m = p.add_(q)
            torch.mm(m, (batch.e2, batch.e1)[side], out=d[side][rows])
            if batch.is_whole:
                d[far].addmm_(m.T, batch.e1[rows])
    drop = (sums[0] + sums[1])[:, None]
    d[0].addcmul_(drop, batch.own(batch.e2), value=-1)
    d[1].addcmul_(drop, batch.own(batch.e1), value=-1)
    return *d, (sums, moments)
