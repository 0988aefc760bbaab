"""DHEL: alignment with the positive, and an energy over negatives of the anchor's own view (arXiv 2405.18045).

    L = -1/B sum_i s_ii/tau + 1/B sum_i log sum_{j != i} exp(e1_i . e1_j/tau) + the same energy of e2

The two parts share no term, so a well aligned positive goes on pulling: its weight is ``1/tau`` and does not vanish as
``(1 - p_i)/tau`` of InfoNCE does. With both views there is one alignment term and both energies, as in the authors'
code; that is not the sum of both one-sided losses, which would have twice the alignment.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from neuclip_lib.contrast import GlobalBatch
from neuclip_lib.losses.blocks import Block, refuse_wrong_shapes, row_blocks


def dhel_loss(e1: Tensor, e2: Tensor, batch: GlobalBatch, tau: Tensor, both: bool = True) -> Tensor:
    """Alignment and energies, with closed-form gradients in both embeddings and tau.

    A view costs two matrix products of b x B x d, and one more where ``batch.keep_similarities`` is off: a view's own
    similarities are held while it is worked on, or made twice, block by block.

    Args:
        e1: image embeddings of this rank's pairs ``[b, d]``, unit rows, with gradient.
        e2: text embeddings ``[b, d]``, unit rows, with gradient.
        batch: all embeddings, detached.
        tau: temperature, a scalar.
        both: take the energies of both views; otherwise of ``e1`` alone, the anchors.

    Returns:
        A scalar that can be differentiated once. On several ranks it is this rank's share: the mean over ranks is the
        loss, and so is the mean of the gradients of whatever the ranks have in common (encoders, tau). They exchange
        B floats a view.

    Raises:
        ValueError: when a shape does not fit the batch.
    """
    refuse_wrong_shapes(e1, e2, batch, tau=tau)
    return _Dhel.apply(e1, e2, tau, batch, both)


class _Dhel(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, e1: Tensor, e2: Tensor, tau: Tensor, batch: GlobalBatch, both: bool) -> Tensor:
        scale = batch.ranks.size / batch.size  # the ranks' gradients are averaged
        slopes_too = any(ctx.needs_input_grad)
        own1, own2 = batch.own(batch.e1), batch.own(batch.e2)
        aligned = (own1 * own2).sum() / tau
        value = -aligned
        d_e1, d_e2 = -own2, -own1
        head = aligned
        for view, own, d_e in ((batch.e1, own1, d_e1), (batch.e2, own2, d_e2))[: 2 if both else 1]:
            energy, pushes = _energy(view, batch, tau, slopes_too)
            value = value + energy
            if pushes is not None:
                # Both partners of a pair push: <E, dE> counts every softmax weight twice.
                head = head - (own * pushes).sum() / (2 * tau)
                d_e.add_(pushes)
        if slopes_too:
            ctx.save_for_backward(d_e1.mul_(scale / tau), d_e2.mul_(scale / tau), scale * head / tau)
        return scale * value

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, ...]:
        gradients = (slope * gradient for gradient in ctx.saved_tensors)
        return (*gradients, None, None)


def _energy(view: Tensor, batch: GlobalBatch, tau: Tensor, slopes_too: bool) -> tuple[Tensor, Tensor | None]:
    """One view's energy over this rank's anchors, and tau times its rows of the gradient of the energy over all.

    With ``log z_i`` the anchors' log-sums, ``P_ij = exp(s_ij/tau - log z_i)`` and a zero diagonal, row i of that
    gradient is ``sum_j (P_ij + P_ji) e_j``: i as an anchor, and as a negative of the others.
    """
    blocks: Iterable[Block] = _MaskedRows(view, batch)
    if slopes_too and batch.keep_similarities:
        blocks = list(blocks)
    log_z = torch.cat([torch.logsumexp(s / tau, 1) for _, s, _ in blocks])  # [b]
    if not slopes_too:
        return log_z.sum(), None
    of_all = batch.ranks.gather(log_z)  # [B]
    pushes = torch.empty_like(batch.own(view))
    for rows, s, _ in blocks:
        x = s / tau
        weights = (x - log_z[rows, None]).exp_()
        weights += x.sub_(of_all).exp_()
        torch.mm(weights, view, out=pushes[rows])
    return log_z.sum(), pushes


class _MaskedRows:
    """A view's similarities with itself, block by block, the diagonal at minus infinity; may be gone through again."""

    def __init__(self, view: Tensor, batch: GlobalBatch) -> None:
        self.view, self.batch = view, batch

    def __iter__(self) -> Iterator[Block]:
        for rows, s, own in row_blocks(self.batch.own(self.view), self.view, self.batch.rows.start):
            own.fill_(-math.inf)
            yield rows, s, own
