"""The normalizer without memory: this batch's own log(eps + g)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from neuclip_lib.contrast import GlobalBatch, Sides
from neuclip_lib.normalizers.base import Normalizer


class BatchNormalizer(Normalizer):
    """``alpha_i = log(eps + g_i)`` from the current batch.

    It minimises the rewrite exactly, so the gradient through alpha is zero (envelope theorem) and alpha is handed over
    as a constant.

    Args:
        eps: ``1/(B-1)`` makes it OpenCLIP's InfoNCE, about zero the decoupled loss.
    """

    def __init__(self, eps: float) -> None:
        if not eps >= 0:
            raise ValueError(f"eps must not be negative, got {eps}")
        self.eps = eps

    def __call__(self, e1: Tensor, e2: Tensor, log_g: Sides, batch: GlobalBatch, tau: Tensor) -> Sides:
        """``log(eps + g)`` of both sides, each ``[b]``, detached."""
        log_g1, log_g2 = log_g[0].detach(), log_g[1].detach()
        log_eps = torch.as_tensor(
            math.log(self.eps) if self.eps > 0 else -math.inf, dtype=log_g1.dtype, device=log_g1.device
        )
        return torch.logaddexp(log_eps, log_g1), torch.logaddexp(log_eps, log_g2)
