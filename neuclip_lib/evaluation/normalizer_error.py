"""How far estimates of the log-normalizer are from its exact value over the whole training set."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from neuclip_lib.contrast import GlobalBatch, Sides
from neuclip_lib.evaluation.ranks import double
from neuclip_lib.ranks import ONE, Ranks

_TILE = 2**22  # numbers held at one time: 32 MiB of float64
_ANCHORS_A_CALL = 256


class Estimator(Protocol):
    """What is measured: a normalizer's call. An attribute ``eps``, where there is one, is its floor."""

    def __call__(self, e1: Tensor, e2: Tensor, log_g: Sides, batch: GlobalBatch, tau: Tensor) -> Sides:
        """Alpha of the anchors, each side [b]."""
        ...


@torch.no_grad()
def normalizer_error(
    e1: Tensor,
    e2: Tensor,
    index: Tensor | None,
    estimators: Mapping[str, Estimator],
    tau: float | Tensor,
    batch_size: int,
    anchors: int = 1000,
    seed: int = 0,
    ranks: Ranks = ONE,
) -> dict[str, dict[str, Any]]:
    """Error of each estimator's alpha against ``exact_log_normalizers``, before the anchors update anything.

    An estimator's own eps is part of its estimate. Each anchor is shown with its own draw of B-1 other pairs, without
    replacement; the same draws serve all estimators. No estimator is updated.

    Args:
        e1: [n, d] image embeddings of the training pairs, unit rows.
        e2: [n, d] text embeddings, unit rows.
        index: [n] stable sample index, for estimators that keep state per sample; None when none does.
        estimators: by name; each on the device of ``e1``.
        tau: the estimators' temperature; ``[2, n]`` for one a side and pair.
        batch_size: B, anchor included.
        anchors: number of anchors, drawn by ``seed``; all n when there are fewer.
        seed: of the anchors and of the draws.
        ranks: over which the estimators' state is spread; every rank calls this with the same arguments.

    Returns:
        By name: ``mse``, ``bias`` (mean of estimate - target) and ``correlation`` (Pearson; None when one side is
        constant) over both sides pooled and in ``image`` and ``text`` (anchors) alone; the same in ``above_eps``
        without the values whose target is below log eps; ``n`` anchors; ``not_finite`` estimates. Every figure is None
        when an estimate is not finite.

    Raises:
        ValueError: for shapes that do not fit, embeddings that are not finite, a batch larger than the data, fewer than
            2 anchors or tau not above 0.
    """
    _check(e1, e2, index, tau, batch_size, anchors)
    rows = _draw_anchors(len(e1), anchors, seed).to(e1.device)
    tau = _double_tau(tau).to(double(e1[:0]).device)
    target = exact_log_normalizers(e1, e2, rows, tau)
    log_g = _drawn_log_g(e1, e2, rows, tau, batch_size, seed)
    result = {}
    for name, estimator in estimators.items():
        estimate = _estimate(estimator, e1, e2, index, rows, log_g, tau, ranks)
        result[name] = _summary(estimate, target, getattr(estimator, "eps", 0.0))
    return result


def exact_log_normalizers(e1: Tensor, e2: Tensor, rows: Tensor, tau: float | Tensor) -> Sides:
    """``log 1/(n-1) sum_{j != i} exp((s_ij - s_ii)/tau)`` of the anchors ``rows`` [a] in float64, each side [a].

    Args:
        e1: [n, d] image embeddings; e2: [n, d] text embeddings; unit rows.
        tau: temperature; ``[2, n]`` for one a side and pair.
    """
    e1, e2, rows = double(e1), double(e2), rows.to(double(e1[:0]).device)
    first, second = _of_rows(tau, rows, e1)
    return _exact_side(e1, e2, rows, first), _exact_side(e2, e1, rows, second)


def _of_rows(tau: float | Tensor, rows: Tensor, like: Tensor) -> Tensor:
    """The temperatures of some anchors ``[2, a]``."""
    tau = _double_tau(tau).to(like.device)
    return tau[:, rows] if tau.ndim else tau.expand(2, len(rows))


def _double_tau(tau: float | Tensor) -> Tensor:
    return double(tau) if isinstance(tau, Tensor) else torch.tensor(tau, dtype=torch.float64)


def _exact_side(own: Tensor, other: Tensor, rows: Tensor, tau: Tensor) -> Tensor:
    total = torch.full((len(rows),), -torch.inf, dtype=own.dtype, device=own.device)
    columns = max(1, _TILE // len(rows))
    positive = (own[rows] * other[rows]).sum(1, keepdim=True)
    for start in range(0, len(other), columns):
        tile = other[start : start + columns]
        x = (own[rows] @ tile.T - positive) / tau[:, None]
        x.masked_fill_(rows[:, None] == torch.arange(start, start + len(tile), device=x.device), -torch.inf)
        total = torch.logaddexp(total, x.logsumexp(1))
    return total - math.log(len(other) - 1)


def _drawn_log_g(e1: Tensor, e2: Tensor, rows: Tensor, tau: Tensor, batch_size: int, seed: int) -> Sides:
    """Each anchor's log mean over its own B-1 drawn pairs, in float64; both sides see the same pairs."""
    n, negatives = len(e1), batch_size - 1
    e1, e2 = double(e1), double(e2)
    generator = np.random.default_rng(seed)
    parts: list[Tensor] = []
    for some in rows.to(e1.device).split(max(1, _TILE // (negatives * e1.shape[1]))):
        draw = [generator.choice(n - 1, negatives, replace=False, shuffle=False) for _ in some]
        other = torch.from_numpy(np.stack(draw)).to(e1.device)
        other += other >= some[:, None]  # n - 1 numbers, made to step over the anchor's own
        a1, a2 = e1[some], e2[some]
        positive = (a1 * a2).sum(1, keepdim=True)
        s = torch.stack([torch.einsum("ad,akd->ak", own, far[other]) for own, far in ((a1, e2), (a2, e1))])
        parts.append(((s - positive) / _of_rows(tau, some, e1)[..., None]).logsumexp(2) - math.log(negatives))
    log_g = torch.cat(parts, 1)
    return log_g[0], log_g[1]


def _estimate(
    estimator: Estimator,
    e1: Tensor,
    e2: Tensor,
    index: Tensor | None,
    rows: Tensor,
    log_g: Sides,
    tau: Tensor,
    ranks: Ranks,
) -> Sides:
    """The estimator's alpha of every anchor, a few hundred anchors a call."""
    parts: list[Sides] = []
    at = torch.arange(len(rows), device=rows.device)
    for some in at.tensor_split(math.ceil(len(rows) / _ANCHORS_A_CALL)):
        i = rows[some]
        # Every rank holds all of these anchors, so none is gathered; only what the estimator itself keeps is spread.
        batch = GlobalBatch(e1[i], e2[i], None if index is None else index.to(i.device)[i], ranks=ranks)
        own = tuple(g.to(e1.device, e1.dtype)[some] for g in log_g)
        own_tau = tau[:, i] if tau.ndim else tau
        parts.append(estimator(batch.e1, batch.e2, (own[0], own[1]), batch, own_tau.to(e1)))
    return double(torch.cat([p[0] for p in parts])), double(torch.cat([p[1] for p in parts]))


def _draw_anchors(n: int, anchors: int, seed: int) -> Tensor:
    return torch.randperm(n, generator=torch.Generator().manual_seed(seed))[:anchors].sort().values


def _summary(estimate: Sides, target: Sides, eps: float) -> dict[str, Any]:
    both, truth = torch.cat(estimate), torch.cat(target)
    above = truth >= (math.log(eps) if eps > 0 else -math.inf)
    return {
        **_figures(both, truth),
        "n": len(target[0]),
        "not_finite": int((~both.isfinite()).sum()),
        "image": _figures(estimate[0], target[0]),
        "text": _figures(estimate[1], target[1]),
        "above_eps": {"eps": eps, **_figures(both[above], truth[above]), "values": int(above.sum())},
    }


def _figures(estimate: Tensor, target: Tensor) -> dict[str, float | None]:
    if len(estimate) == 0 or not bool(estimate.isfinite().all()):
        return {"mse": None, "bias": None, "correlation": None}
    error = estimate - target
    return {
        "mse": float(error.square().mean()),
        "bias": float(error.mean()),
        "correlation": _pearson(estimate, target),
    }


def _pearson(x: Tensor, y: Tensor) -> float | None:
    """None when undefined: a side is constant, up to rounding."""
    a, b = x - x.mean(), y - y.mean()
    for centred, values in ((a, x), (b, y)):
        if float(centred.abs().max()) <= 1e-12 * float(values.abs().max()):
            return None
    return float((a / a.norm()) @ (b / b.norm()))


def _check(e1: Tensor, e2: Tensor, index: Tensor | None, tau: float | Tensor, batch_size: int, anchors: int) -> None:
    if e1.ndim != 2 or e1.shape != e2.shape:
        raise ValueError(f"e1 and e2 must be paired rows [n, d]; got {list(e1.shape)} and {list(e2.shape)}")
    n = len(e1)
    if index is not None and index.shape != (n,):
        raise ValueError(f"index must be [{n}], one integer a pair; got {list(index.shape)}")
    if not 2 <= batch_size <= n:
        raise ValueError(f"batch_size must be from 2 to the {n} training pairs; got {batch_size}")
    if anchors < 2:
        raise ValueError(f"at least 2 anchors are needed; got {anchors}")
    tau = torch.as_tensor(tau)
    if tau.ndim and tau.shape != (2, n):
        raise ValueError(f"tau must be one number or [2, {n}], one a side and pair; got {list(tau.shape)}")
    if not bool((tau > 0).all()):
        raise ValueError(f"tau must be above 0; got {tau.min().item()}")
    if not bool(e1.isfinite().all() and e2.isfinite().all()):
        raise ValueError("some embeddings are not finite: the run has diverged, so its normalizers have no value")
