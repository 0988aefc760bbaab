"""Sums and weights of one block of similarities after another, so that a block is used while it is in the cache."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

Sides = tuple[Tensor, Tensor]


def log_sum(s: Tensor, inverse: Tensor, dim: int, room: Tensor) -> Tensor:
    """``log sum exp(s inverse)`` of a block ``[rows, B]`` along one dimension; ``room`` is at least as large."""
    top = _finite(s.amax(dim, keepdim=inverse.ndim == 2).mul_(inverse))
    return exponentials(s, inverse, -top, room).sum(dim).log_().add_(top.flatten())


def exponentials(s: Tensor, inverse: Tensor, shift: Tensor, room: Tensor) -> Tensor:
    """``exp(s inverse + shift)`` in ``room``; both are one number a row, ``[rows, 1]``, or a column, ``[B]``."""
    out = room[: len(s)]
    # One operator with two numbers a row would leave the vector units of a CPU idle.
    x = torch.addcmul(shift, s, inverse, out=out) if inverse.ndim == 1 else torch.mul(s, inverse, out=out).add_(shift)
    return x.exp_()


def moment(p: Tensor, s: Tensor, dim: int) -> Tensor:
    """Sum of p s; where s is minus infinity, p is 0."""
    return (p * s.clamp_min(torch.finfo(s.dtype).min)).sum(dim)


def _finite(top: Tensor) -> Tensor:
    """In a block of one row the positive's column holds no negative, so its largest is minus infinity."""
    return top.masked_fill_(top == -math.inf, 0)


class Shares:
    """``exp(s_ij/tau - top)`` of all anchors on one process, kept from the sums for the gradient.

    The gradient needs the same exponentials, times one factor a row of the one side and one a column of the other.
    Under the tops of a block's rows and of its columns they are at most 1 whatever tau is, and what underflows is below
    1e-38 of its anchor's largest. One matrix for both sides would not be safe: s/tau spans 2/tau.

    Args:
        e1: image embeddings ``[B, d]``.
        e2: text embeddings ``[B, d]``.
        tau: temperature ``[]``.
        blocks: of rows, in order, the largest first.
    """

    def __init__(self, e1: Tensor, e2: Tensor, tau: Tensor, blocks: list[slice]) -> None:
        self._tau, self._version, self._blocks = tau, tau._version, blocks
        self._p = e1.new_empty(2, len(e1), len(e1))
        self._tops: list[Sides] = []
        self._sums: list[Sides] = []
        of_rows, of_columns = [], []
        scaled = e1 / tau
        for rows in blocks:
            p, x = self._p[0, rows], torch.mm(scaled[rows], e2.T, out=self._p[1, rows])
            # Masked before any reduction: subtracting the positive afterwards cancels all digits when it dominates.
            x.diagonal(rows.start).fill_(-math.inf)
            top = x.amax(1, keepdim=True), _finite(x.amax(0))
            torch.sub(x, top[0], out=p).exp_()
            x.sub_(top[1]).exp_()
            sums = p.sum(1, keepdim=True), x.sum(0)
            of_rows.append((sums[0].log() + top[0])[:, 0])
            of_columns.append(sums[1].log() + top[1])
            self._sums.append(sums)
            self._tops.append(top)
        self.log_sums = torch.stack((torch.cat(of_rows), torch.stack(of_columns).logsumexp(0)))  # [2, B]

    def are_for(self, tau: Tensor) -> bool:
        """Whether they are of this very temperature, which is told without reading it."""
        return tau is self._tau and tau._version == self._version

    def weights(self, log_p: Tensor, factors: Tensor | None) -> Iterator[tuple[slice, Tensor]]:
        """Rows of the sum M of both sides' ``factor exp(s_ij/tau + log_p)``, each valid until the next.

        Its diagonal makes ``M E`` a sum of weighted differences from the positives: it is minus the sums of the image
        anchor's and of the text anchor's weights.

        Args:
            log_p: ``[2, B]``.
            factors: ``[2, B]``, or None for ones.
        """
        of_rows, of_columns = [], []  # what the shares of a row and of a column are multiplied by, block by block
        drop = torch.zeros_like(log_p[0])
        for rows, top, sums in zip(self._blocks, self._tops, self._sums, strict=True):
            f1, f2 = (log_p[0, rows, None] + top[0]).exp_(), (log_p[1] + top[1]).exp_()
            if factors is not None:
                f1.mul_(factors[0, rows, None])
                f2.mul_(factors[1])
            drop[rows].sub_((f1 * sums[0])[:, 0])
            drop.addcmul_(f2, sums[1], value=-1)
            of_rows.append(f1)
            of_columns.append(f2)
        room = self._p.new_empty(self._blocks[0].stop, self._p.shape[2])
        for rows, f1, f2 in zip(self._blocks, of_rows, of_columns, strict=True):
            m = torch.mul(self._p[0, rows], f1, out=room[: len(f1)]).addcmul_(self._p[1, rows], f2)
            m.diagonal(rows.start).copy_(drop[rows])
            yield rows, m
