"""Two functions of alpha that bound the weights ``exp(-alpha) (eps + g)``; ours, off to reproduce the paper.

Both differentiate the batch's own ``log(eps + g)`` too: an anchor that is capped gets exactly the weight of the
decoupled batch loss.
"""

from __future__ import annotations

import math

import torch

from neuclip_lib.contrast import Sides


def cap_weight(alpha: Sides, log_eps_plus_g: Sides, weight_cap: float) -> Sides:
    """``alpha <- max(alpha, log(eps + g) - log(weight_cap))``: no anchor weighs more than ``weight_cap``."""
    floor = math.log(weight_cap)
    return (
        torch.maximum(alpha[0], log_eps_plus_g[0] - floor),
        torch.maximum(alpha[1], log_eps_plus_g[1] - floor),
    )
