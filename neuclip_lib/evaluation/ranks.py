"""Exact ranks in bounded memory: the same for every chunk size, order of rows and device."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_BITS = 26  # of a coordinate; a product of two coordinates then has 52, and float64 holds integers up to 2^53
_ROWS, _TILE = 1024, 2**20  # queries and scores held at one time: 8 MiB of float64, which malloc reuses


@dataclass(frozen=True)
class Ranks:
    """Result of ``ranks``: one entry a query.

    Args:
        rank: [q] from 1; ``candidates + 1`` for a query with a NaN among its scores, which is a miss at every k.
        correct: [q] number of correct candidates.
        nan: number of queries with a NaN among their scores.
        candidates: number of candidates.
    """

    rank: Tensor
    correct: Tensor
    nan: int
    candidates: int

    def median(self) -> float:
        """Median rank; the mean of the two middle ones for an even number of queries."""
        ordered = self.rank.sort().values
        return float(ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2

    def recall(self, k: int) -> float | None:
        """Percent of queries with rank at most ``k``; None (not available) when there are fewer candidates than k."""
        return None if k > self.candidates else 100 * float((self.rank <= k).double().mean())

    def chance(self, k: int) -> float | None:
        """Exact percent expected of a random order without ties; None when there are fewer candidates than k.

        A query with c correct among N has 1 - C(N-c, k) / C(N, k) (hypergeometric), averaged over the queries.
        """
        if k > self.candidates:
            return None
        count, queries = torch.unique(self.correct, return_counts=True)
        total, wrong = float(self.candidates), (self.candidates - count).double()
        none = torch.ones_like(wrong)
        for drawn in range(k):
            none *= (wrong - drawn).clamp(min=0) / (total - drawn)
        return 100 * float(((1 - none) * queries).sum() / queries.sum())


def double(x: Tensor) -> Tensor:
    """``x`` in float64, on the CPU where its device has no float64."""
    return (x.cpu() if x.device.type == "mps" else x).detach().double()


def fixed_point(x: Tensor) -> Tensor:
    """Rows [n, d] as integers in float64, so that every inner product of two such rows is exact.

    A sum of products in floating point depends on its order, hence on the chunk, and two equal candidates can then get
    different scores. Coordinates rounded to 2^-26 of the longest row (error 4e-9, below float32's own for unit rows)
    have inner products that are integers below 2^53: every order of summation gives the same number.
    """
    x = double(x)
    longest = x.norm(dim=1).max().clamp(min=torch.finfo(torch.float64).tiny)
    exponent = torch.ceil(torch.log2(longest) - 0.25)  # the longest row becomes at most 2^(1/4) long
    return torch.round(x * torch.exp2(-exponent) * 2**_BITS)


def ranks(queries: Tensor, candidates: Tensor, group_q: Tensor, group_c: Tensor, chunk: int = 1024) -> Ranks:
    """Rank of the best correct candidate of each query: 1 + the other candidates whose score is not below its score.

    Ties count against. A candidate is correct when its group is the query's; other correct ones never count against.
    A row with a value that is not finite has NaN scores; a query that meets one is a miss at every k and is counted.

    Args:
        queries: [q, d] rows; the score is the inner product (the cosine, for unit rows).
        candidates: [c, d] rows.
        group_q: [q] integers.
        group_c: [c] integers.
        chunk: at most this many queries at a time; it changes memory and speed only.

    Raises:
        ValueError: on shapes that do not fit, no rows, or a query without a correct candidate.
    """
    _check(queries, candidates, group_q, group_c, chunk)
    device = double(queries[:0]).device
    group_q, group_c = group_q.to(device), group_c.to(device)
    # Sorted by group, the correct candidates of a run of queries are one short run of columns.
    order_q, order_c = group_q.argsort(stable=True), group_c.argsort(stable=True)
    groups = group_c[order_c]
    first = torch.searchsorted(groups, group_q[order_q])
    last = torch.searchsorted(groups, group_q[order_q], right=True)
    correct = torch.empty_like(first)
    correct[order_q] = last - first
    _check_answerable(correct, group_q)

    broken_q, broken_c = ~queries.isfinite().all(1).to(device), ~candidates.isfinite().all(1).to(device)
    nan = torch.ones_like(broken_q) if bool(broken_c.any()) else broken_q
    q = fixed_point(torch.where(broken_q[:, None], 0.0, double(queries)))[order_q]
    c = fixed_point(torch.where(broken_c[:, None], 0.0, double(candidates)))[order_c]
    rank = torch.empty_like(first)
    height = min(chunk, _ROWS)
    for start in range(0, len(q), height):
        rows = slice(start, start + height)
        rank[order_q[rows]] = _ranks_of(q[rows], c, first[rows], last[rows])
    rank[nan] = len(c) + 1
    return Ranks(rank, correct, int(nan.sum()), len(c))


def _ranks_of(q: Tensor, c: Tensor, first: Tensor, last: Tensor) -> Tensor:
    """Ranks of queries ``q`` [r, d] whose correct candidates are rows ``first`` to ``last`` (excluded) of ``c``."""
    columns = max(1, _TILE // len(q))
    near = range(int(first.min()), int(last.max()), columns)
    best = torch.full((len(q),), -torch.inf, dtype=q.dtype, device=q.device)
    for start in near:
        scores, right = _near(q, c, first, last, start, columns)
        best = torch.maximum(best, scores.masked_fill(~right, -torch.inf).amax(1))
    not_below = torch.zeros_like(first)
    for start in near:  # the best correct ones themselves (several when they tie) are not "others"
        scores, right = _near(q, c, first, last, start, columns)
        not_below -= ((scores >= best[:, None]) & right).sum(1)
    for start in range(0, len(c), columns):
        not_below += (q @ c[start : start + columns].T >= best[:, None]).sum(1)
    return 1 + not_below


def _near(q: Tensor, c: Tensor, first: Tensor, last: Tensor, start: int, columns: int) -> tuple[Tensor, Tensor]:
    """Scores of one tile of columns and which of them are correct."""
    tile = c[start : start + columns]
    at = torch.arange(start, start + len(tile), device=q.device)
    return q @ tile.T, (at >= first[:, None]) & (at < last[:, None])


def _check(queries: Tensor, candidates: Tensor, group_q: Tensor, group_c: Tensor, chunk: int) -> None:
    if queries.ndim != 2 or candidates.ndim != 2 or queries.shape[1] != candidates.shape[1]:
        raise ValueError(
            f"queries and candidates must be [q, d] and [c, d]; got {list(queries.shape)} and {list(candidates.shape)}"
        )
    if len(queries) == 0 or len(candidates) == 0:
        raise ValueError(f"there is nothing to rank: {len(queries)} queries, {len(candidates)} candidates")
    if group_q.shape != (len(queries),) or group_c.shape != (len(candidates),):
        raise ValueError(
            f"one group a row is needed: {len(queries)} queries have groups of shape {list(group_q.shape)}, "
            f"{len(candidates)} candidates of shape {list(group_c.shape)}"
        )
    if chunk < 1:
        raise ValueError(f"chunk must be at least 1; got {chunk}")


def _check_answerable(correct: Tensor, group_q: Tensor) -> None:
    without = group_q[correct == 0].unique().tolist()
    if without:
        raise ValueError(
            f"{int((correct == 0).sum())} of {len(correct)} queries have no correct candidate (groups {without[:5]}"
            f"{', ...' if len(without) > 5 else ''}); leave these queries out or add their candidates"
        )
