"""The convex-conjugate rewrite of a logarithm, and what it costs to use the wrong alpha.

``f(x) = -log x`` is convex with conjugate ``f*(y) = -1 - log(-y)`` for ``y < 0``. With ``y = -exp(-alpha)``,

    log x = min over alpha of  exp(-alpha) x + alpha - 1,      attained at alpha* = log x.

Everything here takes ``log x`` instead of ``x``: in contrastive losses ``x = eps + g`` reaches ``exp(200)``.
"""

from __future__ import annotations

import torch
from torch import Tensor


def f_star(y: Tensor) -> Tensor:
    """Conjugate of ``-log``: ``-1 - log(-y)``, and infinity where ``y >= 0`` (any shape)."""
    return torch.where(y < 0, -1 - torch.log(-y), torch.inf)


def rewrite(alpha: Tensor, log_x: Tensor) -> Tensor:
    """Upper bound ``h = exp(log_x - alpha) + alpha - 1`` of ``log_x``, equal to it at ``alpha = log_x``."""
    return torch.exp(log_x - alpha) + alpha - 1


def residual(alpha: Tensor, log_x: Tensor) -> Tensor:
    """Slope of the rewrite in alpha, ``r = 1 - exp(log_x - alpha)``: zero at the minimum, negative below it."""
    return -torch.expm1(log_x - alpha)


def psi(u: Tensor) -> Tensor:
    """Excess of the rewrite, ``rewrite(alpha, log_x) - log_x = psi(log_x - alpha)``, ``psi(u) = exp(u) - u - 1``.

    About ``u^2 / 2`` near zero. ``psi(2) = 4.389`` and ``psi(-2) = 1.135``: too small an alpha costs exponentially.
    """
    # exp(u) - 1 - u loses its digits near zero; there the first sixteen terms of the series are exact to rounding.
    series = torch.ones_like(u)
    for k in range(17, 2, -1):
        series = 1 + u / k * series
    return torch.where(u.abs() < 0.5, u * u / 2 * series, torch.expm1(u) - u)
