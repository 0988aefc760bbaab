"""How embeddings lie on the sphere: alignment, uniformity, effective rank, modality gap; all in float64."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from neuclip_lib.evaluation.ranks import double


def alignment(e1: Tensor, e2: Tensor) -> float:
    """Mean squared distance of the pairs (Wang and Isola 2020, exponent 2); lower is closer.

    Args:
        e1: [n, d] unit rows, row i paired with row i of e2 [n, d].
    """
    return float((double(e1) - double(e2)).square().sum(1).mean())


def uniformity(x: Tensor, chunk: int = 1024) -> float | None:
    """``log mean exp(-2 |x_i - x_j|^2)`` over i != j (Wang and Isola 2020, t = 2); lower is more even.

    Args:
        x: [n, d] unit rows.
        chunk: rows and columns of a tile; never n x n is held.

    Returns:
        None when there are fewer than two rows.
    """
    n, x = len(x), double(x)
    if n < 2:
        return None
    square = x.square().sum(1)
    total = torch.zeros((), dtype=x.dtype, device=x.device)
    for i in range(0, n, chunk):
        for j in range(i, n, chunk):
            a, b = slice(i, i + chunk), slice(j, j + chunk)
            distance = (square[a, None] + square[b] - 2 * x[a] @ x[b].T).clamp(min=0)
            kernel = torch.exp(-2 * distance)
            if i == j:
                kernel.fill_diagonal_(0)
            total += kernel.sum() * (1 if i == j else 2)
    return float(torch.log(total / (n * (n - 1))))


def effective_rank(x: Tensor, chunk: int = 8192) -> float | None:
    """``exp`` of the entropy of the singular values divided by their sum (Roy and Vetterli 2007); from 1 to min(n, d).

    The rows are not centred. The triangle of a QR has the same singular values, so rows are taken in chunks.

    Args:
        x: [n, d] rows.

    Returns:
        None when every row is zero.
    """
    x = double(x)
    triangle = x[:0]
    for start in range(0, len(x), chunk):
        triangle = torch.linalg.qr(torch.cat([triangle, x[start : start + chunk]]), mode="r").R
    values = torch.linalg.svdvals(triangle)
    if float(values.sum()) == 0:
        return None
    share = values / values.sum()
    return math.exp(float(torch.special.entr(share).sum()))


def modality_gap(e1: Tensor, e2: Tensor) -> float:
    """Distance between the mean image and the mean text embedding (Liang et al. 2022)."""
    return float((double(e1).mean(0) - double(e2).mean(0)).norm())


def geometry(e1: Tensor, e2: Tensor) -> dict[str, Any]:
    """All four figures; each is None when a row is not finite, and ``nan`` counts such rows.

    Args:
        e1: [n, d] image embeddings, unit rows.
        e2: [n, d] text embeddings, unit rows.

    Raises:
        ValueError: when the shapes differ or there are no rows.
    """
    if e1.shape != e2.shape or e1.ndim != 2 or len(e1) == 0:
        raise ValueError(f"e1 and e2 must be paired rows [n, d]; got {list(e1.shape)} and {list(e2.shape)}")
    nan = sum(int((~e.isfinite().all(1)).sum()) for e in (e1, e2))
    both = {"image": e1, "text": e2}
    return {
        "alignment": None if nan else alignment(e1, e2),
        "uniformity": {side: None if nan else uniformity(e) for side, e in both.items()},
        "effective_rank": {side: None if nan else effective_rank(e) for side, e in both.items()},
        "modality_gap": None if nan else modality_gap(e1, e2),
        "n": len(e1),
        "nan": nan,
    }
