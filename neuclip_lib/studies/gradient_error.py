"""Bias and variance of the gradient that a method gives the encoders, against the exact gradient over all the data.

The target is the same for every method: the gradient in the towers' weights of the global contrastive loss (GCL) with
eps = 0 and without a factor in front,

    F = 1/(2n) sum_i [ log g1_i + log g2_i ],     means over all n - 1 negatives.

A method's own factor (tau in SogCLR, FastCLIP and NeuCLIP) is divided out. Its own eps is not: the positive in
OpenCLIP's denominator is part of its bias.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from neuclip_lib.contrast import GlobalBatch, Sides
from neuclip_lib.losses import Objective
from neuclip_lib.normalizers import BatchNormalizer, Normalizer
from neuclip_lib.parts import Contrastive
from neuclip_lib.studies.two_towers import TwoTowers

EXACT = "exact"
"""The row of the exact normalizer over all n, held: an unbiased gradient, and what its variance is."""
TARGET = Objective(0.0, "one")


class Held(Normalizer):
    """Alpha from a table that never changes.

    Args:
        alpha: ``[n]`` a side.
    """

    needs_index = True

    def __init__(self, alpha: Sides) -> None:
        self.alpha = alpha

    def __call__(self, e1: Tensor, e2: Tensor, log_g: Sides, batch: GlobalBatch, tau: Tensor) -> Sides:
        """The table's entries of the batch's samples, each ``[B]``."""
        assert batch.index is not None
        return self.alpha[0][batch.index].to(e1), self.alpha[1][batch.index].to(e1)


def flat(gradients: Sequence[Tensor]) -> Tensor:
    """One float64 vector ``[p]``."""
    return torch.cat([gradient.double().flatten() for gradient in gradients])


def full_gradient(towers: TwoTowers, x: Sides, tau: Tensor) -> tuple[Tensor, Sides]:
    """The gradient of F in all weights ``[p]``, and ``log g`` over all n ``[n]`` a side; float64, block by block.

    Args:
        x: vectors of all n pairs, a side each.
        tau: a scalar.
    """
    exact = copy.deepcopy(towers).double()
    e1, e2 = exact(x[0].double(), x[1].double())
    batch = GlobalBatch(e1, e2, keep_similarities=False)  # n x n similarities would not fit
    outcome = Contrastive(BatchNormalizer(0.0), TARGET).loss(e1, e2, batch, tau.double())
    gradient = flat(torch.autograd.grad(outcome.loss, list(exact.parameters())))
    assert outcome.log_g is not None
    return gradient, outcome.log_g


def batch_gradient(towers: nn.Module, e: Sides, parts: Contrastive, index: Tensor, tau: Tensor) -> Tensor:
    """A method's gradient on one batch ``[p]``, without its factor; its normalizer is left as it was, to the bit.

    Args:
        e: the batch's embeddings ``[B, d]`` with their graph, which is kept.
        index: places of its pairs among the data.
    """
    leaves = e[0].detach().requires_grad_(), e[1].detach().requires_grad_()
    batch = GlobalBatch(*leaves, index)
    undo = parts.normalizer.remember(batch)
    try:
        loss = parts.loss(*leaves, batch, tau).loss
    finally:
        undo()
    of_embeddings = torch.autograd.grad(loss / parts.objective.sigma(tau), leaves)
    return flat(torch.autograd.grad(e, list(towers.parameters()), of_embeddings, retain_graph=True))


class Moments:
    """Mean ``[p]`` and total variance of vectors, one at a time."""

    def __init__(self) -> None:
        self.count, self.square = 0, 0.0
        self.total: Tensor | float = 0.0

    def add(self, x: Tensor) -> None:
        """Count one vector."""
        self.count += 1
        self.total = self.total + x
        self.square += float(x @ x)

    def against(self, target: Tensor) -> dict[str, float | None]:
        """How the mean and the spread compare with a target ``[p]``; all lengths in units of the target's.

        The squared length of a mean of R vectors is too large by variance/R, which is taken off.

        Returns:
            ``bias``: of the mean. ``cosine``: of mean and target. ``direction``: what is left of the bias after the
            best positive scale. ``scale``: the component of the mean along the target. ``variance``: of one vector.
            ``noise``: root of variance/R, the length that the mean is off by chance; taken off the bias already, but a
            bias well below it is not told from none. Cosine and direction are None where the mean is not longer than
            its noise.

        Raises:
            RuntimeError: for fewer than 2 vectors.
        """
        if self.count < 2 or not isinstance(self.total, Tensor):
            raise RuntimeError(f"a variance needs at least 2 gradients, got {self.count}")
        mean, unit = self.total / self.count, float(target @ target)
        variance = max(0.0, self.square - self.count * float(mean @ mean)) / (self.count - 1)
        noise = variance / self.count
        off = float((mean - target) @ (mean - target)) - noise
        length, along = float(mean @ mean) - noise, float(mean @ target)
        cosine = max(-1.0, min(1.0, along / math.sqrt(length * unit))) if length > noise else None
        # The sine of the angle; beyond a right angle the best scale is none at all.
        direction = None if cosine is None else math.sqrt(1 - max(0.0, cosine) ** 2)
        return {
            "bias": math.sqrt(max(0.0, off) / unit),
            "direction": direction,
            "cosine": cosine,
            "scale": along / unit,
            "variance": variance / unit,
            "noise": math.sqrt(noise / unit),
        }


def gradient_errors(
    towers: TwoTowers,
    x: Sides,
    members: Mapping[str, Contrastive],
    tau: Tensor,
    batch_size: int,
    batches: int,
    seed: int,
) -> tuple[dict[str, dict[str, float | None]], Sides]:
    """By name, what :meth:`Moments.against` says of each member's gradient, ``exact`` added; and the exact ``log g``.

    All members see the same fresh batches, each drawn from all n pairs without replacement, and each starts every batch
    from the state it has now.

    Args:
        x: vectors of all n pairs.
        members: their normalizers are left as they were, to the bit.
        seed: of the batches.
    """
    target, log_g = full_gradient(towers, x, tau)
    everyone = {**members, EXACT: Contrastive(Held(log_g), TARGET)}
    moments = {name: Moments() for name in everyone}
    generator = torch.Generator().manual_seed(seed)
    for _ in range(batches):
        index = torch.randperm(len(x[0]), generator=generator)[:batch_size]
        e = towers(x[0][index], x[1][index])
        for name, parts in everyone.items():
            moments[name].add(batch_gradient(towers, e, parts, index, tau))
    return {name: each.against(target) for name, each in moments.items()}, log_g
