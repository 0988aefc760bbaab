"""Two functions of alpha that bound the weights ``exp(-alpha) (eps + g)``; ours, off to reproduce the paper.

Both follow the batch's own ``log(eps + g)`` too: a capped anchor gets exactly the weight of the decoupled batch loss.
How far each alpha does so is handed on as ``batch_part``, its derivative in that; the loss follows it in closed form.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from neuclip_lib.contrast import Sides


@dataclass(frozen=True)
class Stabilised:
    """Alpha of the encoder step ``[b]`` a side, and its derivative in the batch's ``log(eps + g)``; None is zero."""

    alpha: Sides
    batch_part: Sides | None = None


def cap_weight(raw: Stabilised, log_eps_plus_g: Sides, weight_cap: float) -> Stabilised:
    """``alpha <- max(alpha, log(eps + g) - log(weight_cap))``: no anchor weighs more than ``weight_cap``."""
    floors = [side.detach() - math.log(weight_cap) for side in log_eps_plus_g]
    capped = [floor > alpha.detach() for alpha, floor in zip(raw.alpha, floors, strict=True)]
    alpha = [torch.where(c, floor, a) for c, floor, a in zip(capped, floors, raw.alpha, strict=True)]
    slope = [1 - c.to(floor) for c, floor in zip(capped, floors, strict=True)]
    return _followed(raw, alpha, slope)


def share_with_batch(raw: Stabilised, log_eps_plus_g: Sides, share: float) -> Stabilised:
    """``alpha <- log((1 - share) exp(alpha) + share (eps + g))``: ``gcl-batch`` at 1, the plain alpha at 0.

    ``exp(-alpha)(eps + g)`` is then at most ``1/share``. With the batch's part of alpha differentiated, the weight of
    an anchor's gradient of ``log g`` is at most ``(1 + share)^2 / (4 share)``.
    """
    if share == 0:
        return raw
    log_rest = math.log1p(-share) if share < 1 else -math.inf
    alpha = [
        torch.logaddexp(a + log_rest, x.detach() + math.log(share))
        for a, x in zip(raw.alpha, log_eps_plus_g, strict=True)
    ]
    slope = [(a + log_rest - mixed).detach().exp() for a, mixed in zip(raw.alpha, alpha, strict=True)]
    return _followed(raw, alpha, slope)


def _followed(raw: Stabilised, alpha: list, slope: list) -> Stabilised:
    """The chain rule for the batch's part: ``1 - slope`` of this function, and ``slope`` of what came before."""
    before = raw.batch_part or (torch.zeros_like(slope[0]), torch.zeros_like(slope[1]))
    first, second = (1 - s + s * part for s, part in zip(slope, before, strict=True))
    return Stabilised((alpha[0], alpha[1]), (first, second))
