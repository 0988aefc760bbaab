"""How large rho must be for the temperature that is wanted, measured on embeddings."""

from __future__ import annotations

import math

import torch
from torch import Tensor

_BLOCK = 1 << 22  # similarities held at one time: 32 MiB of float64


@torch.no_grad()
def kl_from_uniform(e1: Tensor, e2: Tensor, tau: float | Tensor, block: int | None = None) -> Tensor:
    """``KL(p_i || uniform)`` of every anchor's weights over its n - 1 negatives, ``p_ij ~ exp(s_ij/tau)``, j != i.

    It grows as tau falls, from 0 towards ``log(n - 1)``, all weight on one negative.

    Args:
        e1: image embeddings ``[n, d]``, unit rows.
        e2: text embeddings ``[n, d]``, unit rows.
        tau: temperature: one number, or ``[2, n]`` for one a side and anchor.
        block: anchors at a time; by default as many as make 4 million similarities.

    Returns:
        ``[2, n]`` in float64: image anchors (texts vary), text anchors.

    Raises:
        ValueError: for shapes that do not fit, fewer than 2 pairs, a tau or block that is not positive, embeddings that
            are not finite.
    """
    if e1.ndim != 2 or e1.shape != e2.shape:
        raise ValueError(f"e1 and e2 must be paired rows [n, d]; got {list(e1.shape)} and {list(e2.shape)}")
    n = len(e1)
    if n < 2:
        raise ValueError(f"at least 2 pairs are needed, got {n}: one pair has no negatives")
    if block is not None and block < 1:
        raise ValueError(f"block is the number of anchors at a time and must be at least 1, got {block}")
    e1, e2 = _double(e1), _double(e2)
    taus = _double(tau if isinstance(tau, Tensor) else torch.tensor(tau, dtype=torch.float64)).to(e1.device)
    if taus.shape not in ((), (2, n)):
        raise ValueError(f"tau must be one number or [2, {n}]; got {list(taus.shape)}")
    if not bool((taus > 0).all()):
        raise ValueError(f"tau must be positive, got {taus.min().item()}")
    if not bool(e1.isfinite().all() and e2.isfinite().all()):
        raise ValueError("some embeddings are not finite, so rho cannot be measured on them")
    taus = taus.expand(2, n)
    return torch.stack((_side(e1, e2, taus[0], block), _side(e2, e1, taus[1], block)))


def suggest_rho(e1: Tensor, e2: Tensor, tau: float | Tensor, block: int | None = None) -> float:
    """The rho under which a learned tau comes to rest at ``tau``, for these embeddings and all their negatives.

    With eps = 0 and the exact alpha, ``d/dtau [ tau (log g_i + rho) ] = rho - KL(p_i || uniform)``. So a single tau
    (RGCL-g: FastCLIP-v3, NeuCLIP) is stationary exactly where the mean KL over anchors and both sides is rho, and the
    tau of one sample (RGCL) where its own KL is. The loss is convex in tau: where rho is above the KL tau falls, where
    it is below tau grows. The KL cannot exceed ``log(n - 1)``, so a larger rho drives tau to its lower bound; published
    values, 6.5 to 16, are for millions of samples.

    Measure it on what alpha describes: all training pairs for an estimator of the global normalizer, one batch for a
    normalizer of the batch, where there are fewer negatives and the KL is smaller.

    Args:
        e1: image embeddings ``[n, d]``, unit rows.
        e2: text embeddings ``[n, d]``, unit rows.
        tau: the temperature that is wanted; ``[2, n]`` for one a side and anchor.
        block: anchors at a time.

    Raises:
        ValueError: as :func:`kl_from_uniform`.
    """
    return float(kl_from_uniform(e1, e2, tau, block).mean())


def _side(own: Tensor, other: Tensor, tau: Tensor, block: int | None) -> Tensor:
    n = len(own)
    height = max(1, _BLOCK // n) if block is None else block
    parts = []
    for low in range(0, n, height):
        s = own[low : low + height] @ other.T
        s.diagonal(low).fill_(-math.inf)
        x = s / tau[low : low + height, None]
        log_p = x.log_softmax(1)
        # The positive has no weight, and 0 times minus infinity is not a number.
        log_p.diagonal(low).zero_()
        p = log_p.exp()
        p.diagonal(low).zero_()
        parts.append((p * log_p).sum(1))
    return torch.cat(parts) + math.log(n - 1)


def _double(x: Tensor) -> Tensor:
    """In float64, on the CPU where the device has no float64."""
    return (x.cpu() if x.device.type == "mps" else x).detach().double()
