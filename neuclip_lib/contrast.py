"""From similarities to log_g: the stable, masked log-mean-exp over negatives.

Symbols (the same everywhere): ``e1_i``, ``e2_i`` unit image and text embeddings, ``s_ij = e1_i . e2_j``, ``B`` pairs
in the global batch, ``tau`` the temperature, and per anchor, positive excluded,

    g1_i = 1/(B-1) sum_{j != i} exp((s_ij - s_ii)/tau)     image anchor, texts vary
    g2_i = 1/(B-1) sum_{j != i} exp((s_ji - s_ii)/tau)     text anchor, images vary
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

Sides = tuple[Tensor, Tensor]
"""One tensor for the image anchors and one for the text anchors."""

BLOCK_ELEMENTS = 1 << 20
"""Similarities handled at a time: a block of rows with its temporaries stays small beside the B x B matrix."""


@dataclass
class GlobalBatch:
    """The detached embeddings of all pairs in one global batch, in the same order everywhere.

    Args:
        e1: image embeddings, unit rows ``[B, d]``.
        e2: text embeddings, unit rows ``[B, d]``.
        index: stable sample index of each pair ``[B]``, for normalizers that keep state per sample.
        keep_similarities: hold the B x B similarities so that they are computed once a step; without it they are
            recomputed block by block and memory stays linear in B.

    Raises:
        ValueError: when the shapes disagree or there are fewer than 2 pairs (a pair alone has no negatives).
    """

    e1: Tensor
    e2: Tensor
    index: Tensor | None = None
    keep_similarities: bool = True
    _similarities: Tensor | None = field(default=None, init=False, repr=False)

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

    @property
    def size(self) -> int:
        """Number of pairs B."""
        return self.e1.shape[0]

    @property
    def similarities(self) -> Tensor:
        """All ``s_ij`` ``[B, B]``, image i against text j."""
        if self._similarities is None:
            self._similarities = self.e1 @ self.e2.T
        return self._similarities

    @property
    def positives(self) -> Tensor:
        """The matching pairs' similarities ``s_ii`` ``[B]``."""
        return (self.e1 * self.e2).sum(1)

    def blocks(self, tau: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """Rows of ``s_ij / tau`` with the positives at minus infinity, as (rows, fresh [rows, B] tensor)."""
        height = max(1, BLOCK_ELEMENTS // self.size)
        for low in range(0, self.size, height):
            rows = slice(low, min(low + height, self.size))
            s = self.similarities[rows] if self.keep_similarities else self.e1[rows] @ self.e2.T
            x = s / tau
            # Masked before any reduction: subtracting the positive afterwards cancels all digits when it dominates.
            x.diagonal(low).fill_(-math.inf)
            yield rows, x


def log_mean_exp_over_negatives(e1: Tensor, e2: Tensor, batch: GlobalBatch, tau: Tensor) -> Sides:
    """``log_g`` of every anchor, differentiable in the embeddings and the temperature.

    Args:
        e1: image embeddings ``[B, d]`` with gradient, the rows of ``batch.e1``.
        e2: text embeddings ``[B, d]`` with gradient, the rows of ``batch.e2``.
        batch: the same embeddings, detached.
        tau: temperature, a scalar tensor.

    Returns:
        ``(log_g1, log_g2)``, each ``[B]``. The backward costs two products of B x B x d, and only if it is used.
    """
    return _LogMeanExp.apply(e1, e2, tau, batch)


class _LogMeanExp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, e1: Tensor, e2: Tensor, tau: Tensor, batch: GlobalBatch) -> Sides:
        rows_of_1 = []
        log_sum_2 = torch.full_like(batch.positives, -math.inf)
        for _, x in batch.blocks(tau):
            rows_of_1.append(torch.logsumexp(x, 1))
            log_sum_2 = torch.logaddexp(log_sum_2, torch.logsumexp(x, 0))
        shift = batch.positives / tau + math.log(batch.size - 1)
        log_g1, log_g2 = torch.cat(rows_of_1) - shift, log_sum_2 - shift
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


def gradients_of_weighted_differences(
    batch: GlobalBatch, tau: Tensor, log_weights: Sides, slopes: Sides | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of ``sum_i slope1_i w1_i g1_i + slope2_i w2_i g2_i`` with the weights ``w`` held constant.

    Every contrastive loss of the family has this gradient in its embeddings; the methods differ in the weights. With
    ``P1_ij = w1_i exp((s_ij - s_ii)/tau)/(B-1)``, ``P2_ij`` the same for text anchor j, and zero diagonals,

        dE1 = [ (P1 + P2) E2 - D * E2 ] / tau,    dE2 = [ (P1 + P2)^T E1 - D * E1 ] / tau,
        D_i = sum_j P1_ij + sum_j P2_ji,          dtau = -<E1, dE1> / tau.

    Args:
        batch: the global batch.
        tau: temperature, a scalar tensor.
        log_weights: ``log w`` of both sides, each ``[B]``; kept in logs because ``exp(d)`` alone overflows.
        slopes: factors of both sides, each ``[B]`` and of any sign; ones if not given.

    Returns:
        ``(dE1 [B, d], dE2 [B, d], dtau [])``: two products of B x B x d.
    """
    shift = batch.positives / tau + math.log(batch.size - 1)
    from_1, from_2 = log_weights[0] - shift, log_weights[1] - shift
    d_e1, d_e2 = torch.empty_like(batch.e1), torch.zeros_like(batch.e2)
    drop, columns_of_2 = torch.empty_like(shift), torch.zeros_like(shift)
    for rows, x in batch.blocks(tau):
        p1 = (x + from_1[rows, None]).exp_()
        p2 = x.add_(from_2).exp_()
        if slopes is not None:
            p1.mul_(slopes[0][rows, None])
            p2.mul_(slopes[1])
        drop[rows] = p1.sum(1)
        columns_of_2 += p2.sum(0)
        m = p1.add_(p2)
        torch.mm(m, batch.e2, out=d_e1[rows])
        d_e2.addmm_(m.T, batch.e1[rows])
    drop += columns_of_2
    d_e1.addcmul_(drop[:, None], batch.e2, value=-1).div_(tau)
    d_e2.addcmul_(drop[:, None], batch.e1, value=-1).div_(tau)
    return d_e1, d_e2, -(batch.e1 * d_e1).sum() / tau
