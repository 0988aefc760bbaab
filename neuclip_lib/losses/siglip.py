"""SigLIP: every pair of an image and a text is a yes-or-no question of its own (arXiv 2303.15343).

    L = -1/B sum_i sum_j log sigmoid(z_ij (s_ij/tau + bias)),     z = +1 for i = j, -1 otherwise

divided by the number of images, not of pairs. No anchor has a normalizer, hence nothing is exchanged between ranks
but the embeddings.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import softplus

from neuclip_lib.contrast import GlobalBatch
from neuclip_lib.losses.blocks import refuse_wrong_shapes, row_blocks


@dataclass(frozen=True)
class SiglipOptions:
    """How the bias starts; the published temperature to start from is tau = .1.

    Args:
        bias: bias at step 0. -10 is the published value, for batches of tens of thousands. ``None`` means
            ``-log(B-1) - 1/(2 d tau^2)``, where the loss of random unit embeddings is smallest: a small batch starts
            without first moving its bias there.
    """

    bias: float | None = -10.0

    def check(self) -> None:
        """Raise ValueError, naming the value, when an option makes no sense."""
        if self.bias is not None and not math.isfinite(self.bias):
            raise ValueError(f"SigLIP's bias must be finite, or None to fit it to the batch; got {self.bias}")

    def start(self, size: int, dim: int, tau: float) -> float:
        """The bias at step 0.

        Args:
            size: pairs in a global batch B.
            dim: embedding dimension d.
            tau: temperature at step 0.

        Raises:
            ValueError: when the bias is not finite, or one of the arguments is out of range.
        """
        self.check()
        if size < 2 or dim < 1 or not tau > 0:
            raise ValueError(
                f"SigLIP's bias needs a batch of at least 2 pairs, a dimension of at least 1 and a positive "
                f"temperature; got size={size}, dim={dim}, tau={tau}"
            )
        if self.bias is not None:
            return self.bias
        # Mean of exp(s/tau) for random s of variance 1/d: B-1 negatives then weigh as much as the positive.
        return -math.log(size - 1) - 1 / (2 * dim * tau**2)


def siglip_loss(e1: Tensor, e2: Tensor, batch: GlobalBatch, tau: Tensor, bias: Tensor) -> Tensor:
    """The sigmoid loss, with closed-form gradients in both embeddings, tau and the bias.

    Three matrix products of B x B x d, on several ranks four of b x B x d. Memory is linear in B: the similarities are
    made block by block and dropped, whatever ``batch.keep_similarities`` says.

    Args:
        e1: image embeddings of this rank's pairs ``[b, d]``, unit rows, with gradient.
        e2: text embeddings ``[b, d]``, unit rows, with gradient.
        batch: all embeddings, detached.
        tau: temperature, a scalar; ``1/tau`` is what the paper calls t.
        bias: added to every ``s_ij/tau``, a scalar.

    Returns:
        A scalar that can be differentiated once. On several ranks it is this rank's share: the mean over ranks is the
        loss, and so is the mean of the gradients of whatever the ranks have in common (encoders, tau, bias).

    Raises:
        ValueError: when a shape does not fit the batch.
    """
    refuse_wrong_shapes(e1, e2, batch, tau=tau, bias=bias)
    return _Siglip.apply(e1, e2, tau, bias, batch)


class _Siglip(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, e1: Tensor, e2: Tensor, tau: Tensor, bias: Tensor, batch: GlobalBatch) -> Tensor:
        scale = batch.ranks.size / batch.size  # the ranks' gradients are averaged
        if not any(ctx.needs_input_grad):
            value = e1.new_zeros(())
            for _, s, own in row_blocks(batch.own(batch.e1), batch.e2, batch.rows.start):
                value += _penalties(s, own, tau, bias)
            return scale * value
        value, d_e1, d_e2, d_bias = _sums(batch, tau, bias)
        d_e1.mul_(scale / tau)
        d_e2.mul_(scale / tau)
        # <E1, dE1> is the sum of s_ij/tau times the slope over this rank's images: each pair counts on one rank.
        d_tau = -(batch.own(batch.e1) * d_e1).sum() / tau
        ctx.save_for_backward(d_e1, d_e2, d_tau, scale * d_bias)
        return scale * value

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, ...]:
        gradients = (slope * gradient for gradient in ctx.saved_tensors)
        return (*gradients, None)


def _wrongness(s: Tensor, own: Tensor, tau: Tensor, bias: Tensor) -> Tensor:
    """``y = -z (s/tau + bias)``, in place of ``s``; ``own`` is the view of the positives."""
    s.div_(tau).add_(bias)
    own.neg_()
    return s


def _penalties(s: Tensor, own: Tensor, tau: Tensor, bias: Tensor) -> Tensor:
    """Sum of ``-log sigmoid(-y)``; leaves y in place of ``s``."""
    # Above its threshold softplus answers y itself; the default of 20 would cost float64 half its digits.
    return softplus(_wrongness(s, own, tau, bias), threshold=40).sum()


def _slopes(y: Tensor, own: Tensor) -> Tensor:
    """Derivative of that sum in ``s/tau + bias``, in place of ``y``: ``-z sigmoid(y)``."""
    y.sigmoid_()
    own.neg_()
    return y


def _sums(batch: GlobalBatch, tau: Tensor, bias: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Over this rank's images: the value and its slope in the bias; its rows of both embeddings' slopes, ``[b, d]``."""
    e1, e2, first = batch.own(batch.e1), batch.own(batch.e2), batch.rows.start
    d_e1, d_e2 = torch.empty_like(e1), torch.zeros_like(e2)
    value, d_bias = e1.new_zeros(()), e1.new_zeros(())
    for rows, s, own in row_blocks(e1, batch.e2, first):
        value += _penalties(s, own, tau, bias)
        slopes = _slopes(s, own)
        d_bias += slopes.sum()
        torch.mm(slopes, batch.e2, out=d_e1[rows])
        if batch.is_whole:  # the same slopes are the texts' columns
            d_e2.addmm_(slopes.T, e1[rows])
    if not batch.is_whole:
        for rows, s, own in row_blocks(e2, batch.e1, first):
            slopes = _slopes(_wrongness(s, own, tau, bias), own)
            torch.mm(slopes, batch.e1, out=d_e2[rows])
    return value, d_e1, d_e2, d_bias
