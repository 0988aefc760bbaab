"""KCL, kernel contrastive learning: a kernel of the distance for alignment, and its energy in both views.

    L = -2/B sum_i k(e1_i, e2_i) + gamma [ mean_{i<j} k(e1_i, e1_j) + mean_{i<j} k(e2_i, e2_j) ]     (arXiv 2405.18045)

Means over pairs, no logarithm of a mean: the expected loss of a random batch is the same for every batch size (only its
spread is not). There is no temperature, and ranks exchange nothing but the embeddings: the kernel is symmetric, so a
rank knows all that its rows do to the others' energies.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from neuclip_lib.contrast import GlobalBatch
from neuclip_lib.losses.blocks import refuse_wrong_shapes, row_blocks

KernelName = Literal["gaussian", "log", "imq", "riesz", "gaussian_riesz"]

Kernel = Callable[[Tensor], tuple[Tensor, Tensor]]
"""From squared distances to the kernel and its derivative in them."""


@dataclass(frozen=True)
class KclOptions:
    """The kernel, and the weight of the energies; distances r are those of unit vectors, between 0 and 2.

    Args:
        kernel: ``gaussian`` ``exp(-t r^2)``; ``log`` ``-log(t r^2 + 1)``; ``imq`` ``c/sqrt(c^2 + r^2)``; ``riesz``
            ``sign(s) r^-s``; ``gaussian_riesz``, gaussian for alignment and riesz for the energies. As in the authors'
            code the energies of ``log`` are half of what its formula says; twice the gamma undoes that.
        t: width of ``gaussian`` and ``log``.
        gamma: weight of the energies.
        s: power of ``riesz``.
        c: width of ``imq``.
        closest: smaller distances count as this in ``riesz``, and neither pull nor push. The energy of two equal
            captions would be infinite, and in float32 rounding decides what smaller distances are.

    Raises:
        ValueError: when a value is out of range.
    """

    kernel: KernelName = "gaussian"
    t: float = 2.0
    gamma: float = 16.0
    s: float = 1.0
    c: float = 2.0
    closest: float = 1e-2

    def __post_init__(self) -> None:
        if self.kernel not in get_args(KernelName):
            raise ValueError(f"KCL's kernel must be one of {', '.join(get_args(KernelName))}; got {self.kernel!r}")
        for name in ("t", "gamma", "c"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"KCL's {name} must be finite and positive, got {value}")
        if not (math.isfinite(self.s) and self.s != 0):
            raise ValueError(f"KCL's s is the power of the riesz kernel: finite and not 0, got {self.s}")
        if not 0 < self.closest < 2:
            raise ValueError(f"KCL's closest is a distance of unit vectors, between 0 and 2; got {self.closest}")

    def check(self) -> None:
        """Refuse what has a value but should not train.

        Raises:
            ValueError: for ``riesz`` with s > 0: its alignment ``-2 r^-s`` diverges as positives meet. ``closest``
                bounds it, but those pairs then outweigh everything else.
        """
        if self.kernel == "riesz" and self.s > 0:
            raise ValueError(
                f"the alignment of KCL with riesz and s={self.s} > 0 diverges as positives meet; "
                "take gaussian_riesz, which aligns by a gaussian, or s < 0"
            )


def kcl_loss(e1: Tensor, e2: Tensor, batch: GlobalBatch, options: KclOptions) -> Tensor:
    """Alignment and energies, with closed-form gradients in both embeddings; a step's temperature plays no part.

    A view costs two matrix products of b x B x d; memory is linear in B, as similarities are made block by block.

    Args:
        e1: image embeddings of this rank's pairs ``[b, d]``, unit rows, with gradient.
        e2: text embeddings ``[b, d]``, unit rows, with gradient.
        batch: all embeddings, detached.
        options: kernel and weights; ``options.check()`` says whether they can train.

    Returns:
        A scalar that can be differentiated once; the gradient is that of the distances ``|x - y|``. On several ranks it
        is this rank's share: the mean over ranks is the loss, and so is the mean of the encoders' gradients.

    Raises:
        ValueError: when a shape does not fit the batch.
    """
    refuse_wrong_shapes(e1, e2, batch)
    return _Kcl.apply(e1, e2, batch, options)


class _Kcl(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, e1: Tensor, e2: Tensor, batch: GlobalBatch, options: KclOptions) -> Tensor:
        align, repel, energy_factor = _KERNELS[options.kernel](options)
        slopes_too = any(ctx.needs_input_grad)
        scale = batch.ranks.size / batch.size  # the ranks' gradients are averaged
        # Mean over i < j: half of the sum over i != j, so every pair is seen from both ends, each by its owner.
        energy_scale = scale * energy_factor * options.gamma / (batch.size - 1)
        own1, own2 = batch.own(batch.e1), batch.own(batch.e2)
        apart = own1 - own2
        # From differences, not similarities: near alignment these keep the digits that 2 - 2 s_ii has lost.
        k, slope = align((apart * apart).sum(1))
        value = -2 * scale * k.sum()
        pull = -4 * scale * slope[:, None] * apart
        gradients = []
        for view, own, of_alignment in ((batch.e1, own1, pull), (batch.e2, own2, -pull)):
            energy, push = _energy(view, own, batch, repel, slopes_too)
            value = value + energy_scale * energy
            if push is not None:
                # 2 from the chain rule of r^2, 2 because the pair (j, i) moves with e_i as (i, j) does.
                gradients.append(of_alignment + 4 * energy_scale * push)
        ctx.save_for_backward(*gradients)
        return value

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, ...]:
        gradients = (slope * gradient for gradient in ctx.saved_tensors)
        return (*gradients, None, None)


def _energy(
    view: Tensor, own: Tensor, batch: GlobalBatch, kernel: Kernel, slopes_too: bool
) -> tuple[Tensor, Tensor | None]:
    """Sum of the kernel over this rank's anchors i and all j != i, and ``sum_j k'(r_ij^2) (e_i - e_j)`` ``[b, d]``."""
    value = own.new_zeros(())
    push = torch.empty_like(own) if slopes_too else None
    for rows, s, itself in row_blocks(own, view, batch.rows.start):
        itself.zero_()  # where every kernel has a slope; e_i - e_i = 0 takes it out of the push
        k, slope = kernel(s.mul_(-2).add_(2))
        k.diagonal(batch.rows.start + rows.start).zero_()
        value += k.sum()
        if push is not None:
            torch.mm(slope, view, out=push[rows])
            push[rows].neg_().addcmul_(slope.sum(1, keepdim=True), own[rows])
    return value, push


def _gaussian(t: float) -> Kernel:
    def kernel(square: Tensor) -> tuple[Tensor, Tensor]:
        k = (-t * square).exp_()
        return k, -t * k

    return kernel


def _log(t: float) -> Kernel:
    def kernel(square: Tensor) -> tuple[Tensor, Tensor]:
        x = t * square
        k = torch.log1p(x).neg_()
        return k, x.add_(1).reciprocal_().mul_(-t)

    return kernel


def _imq(c: float) -> Kernel:
    def kernel(square: Tensor) -> tuple[Tensor, Tensor]:
        x = square + c**2
        k = torch.rsqrt(x).mul_(c)
        return k, x.reciprocal_().mul_(k).mul_(-0.5)

    return kernel


def _riesz(s: float, closest: float) -> Kernel:
    def kernel(square: Tensor) -> tuple[Tensor, Tensor]:
        x = square.clamp_min(closest**2)
        k = x.pow(-s / 2).mul_(math.copysign(1, s))
        slope = x.reciprocal_().mul_(k).mul_(-s / 2)
        return k, slope.masked_fill_(square < closest**2, 0)

    return kernel


Parts = tuple[Kernel, Kernel, float]
"""The kernels of alignment and of the energies, and a factor of the energies."""


def _same(kernel: Kernel, energy_factor: float = 1.0) -> Parts:
    return kernel, kernel, energy_factor


_KERNELS: dict[str, Callable[[KclOptions], Parts]] = {
    "gaussian": lambda o: _same(_gaussian(o.t)),
    "log": lambda o: _same(_log(o.t), energy_factor=0.5),
    "imq": lambda o: _same(_imq(o.c)),
    "riesz": lambda o: _same(_riesz(o.s, o.closest)),
    "gaussian_riesz": lambda o: (_gaussian(o.t), _riesz(o.s, o.closest), 1.0),
}
