"""log_normalizer(s, tau): log of the mean over the B-1 negatives of exp((s_ij - s_ii)/tau), for each image."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from neuclip_lib.contrast import GlobalBatch, log_mean_exp_over_negatives
from neuclip_lib.course.exercise import Case, Exercise, Wrong


def log_normalizer(s: Tensor, tau: float) -> Tensor:
    """``log_g`` of every image ``[B]`` from the similarities ``s`` ``[B, B]`` (image i, text j) and a temperature."""
    texts = torch.eye(len(s), dtype=s.dtype, device=s.device)  # rows s_i against unit axes: the similarities are s
    return log_mean_exp_over_negatives(s, texts, GlobalBatch(s, texts), torch.as_tensor(tau, dtype=s.dtype))[0]


def cases() -> list[Case]:
    """Similarities as two unit embeddings give them; the last temperature overflows float32 when not shifted."""
    draw = torch.Generator().manual_seed(0)
    made = [Case("2 pairs, tau 0.5", (torch.tensor([[0.5, 0.1], [0.3, 0.2]]), 0.5))]
    for size, tau in ((3, 0.5), (4, 0.07), (8, 0.01)):
        e1, e2 = (torch.nn.functional.normalize(torch.randn(size, 4, generator=draw), dim=1) for _ in range(2))
        made.append(Case(f"{size} pairs, tau {tau}", (e1 @ e2.T, tau)))
    return made


def _without_positive(x: Tensor) -> Tensor:
    return x.masked_fill(torch.eye(len(x), dtype=torch.bool), -math.inf)


def _shifted(s: Tensor, tau: float) -> Tensor:
    return (s - s.diagonal()[:, None]) / tau


def _log_sum(s: Tensor, tau: float) -> Tensor:
    """The right sum in logs, not yet divided."""
    return torch.logsumexp(_without_positive(_shifted(s, tau)), 1)


def _positive_left_in(s: Tensor, tau: float) -> Tensor:
    return torch.logsumexp(_shifted(s, tau), 1) - math.log(len(s))


def _positive_left_in_divided_by_negatives(s: Tensor, tau: float) -> Tensor:
    return torch.logsumexp(_shifted(s, tau), 1) - math.log(len(s) - 1)


def _sum_for_mean(s: Tensor, tau: float) -> Tensor:
    return _log_sum(s, tau)


def _divided_by_all(s: Tensor, tau: float) -> Tensor:
    return _log_sum(s, tau) - math.log(len(s))


def _multiplied_by_tau(s: Tensor, tau: float) -> Tensor:
    return log_normalizer(s, 1 / tau)


def _not_shifted(s: Tensor, tau: float) -> Tensor:
    return torch.logsumexp(_without_positive(s / tau), 1) - math.log(len(s) - 1)


def _texts_as_anchors(s: Tensor, tau: float) -> Tensor:
    return log_normalizer(s.T, tau)


def _shifted_by_column(s: Tensor, tau: float) -> Tensor:
    return torch.logsumexp(_without_positive((s - s.diagonal()) / tau), 1) - math.log(len(s) - 1)


def _other_base(s: Tensor, tau: float) -> Tensor:
    return log_normalizer(s, tau) / math.log(10)


def _base_two(s: Tensor, tau: float) -> Tensor:
    return log_normalizer(s, tau) / math.log(2)


def _no_log(s: Tensor, tau: float) -> Tensor:
    return log_normalizer(s, tau).exp()


def _mean_of_logs(s: Tensor, tau: float) -> Tensor:
    return _shifted(s, tau).sum(1) / (len(s) - 1)


def _overflows(s: Tensor, tau: float) -> Tensor:
    return (_without_positive(_shifted(s, tau)).exp().sum(1) / (len(s) - 1)).log()


_LEFT_IN = "the positive is still in: leave out j = i before you sum, so that only the B-1 negatives count."

EXERCISE = Exercise(
    name="log_normalizer",
    reference=log_normalizer,
    cases=cases,
    wrong={
        "positive left in": Wrong(_positive_left_in, _LEFT_IN),
        "positive left in, divided by B-1": Wrong(_positive_left_in_divided_by_negatives, _LEFT_IN),
        "sum for mean": Wrong(
            _sum_for_mean, "this is the log of the sum; the normalizer is the log of the mean: divide by B-1."
        ),
        "divided by B": Wrong(_divided_by_all, "you divide by B; there are B-1 negatives."),
        "multiplied by tau": Wrong(_multiplied_by_tau, "you multiply by tau; the differences are divided by it."),
        "not shifted": Wrong(
            _not_shifted, "s_ii is not taken off: each similarity is measured against that of the image's own caption."
        ),
        "texts as anchors": Wrong(
            _texts_as_anchors, "this is the text side (one image varies over a column); here each row i is an image."
        ),
        "shifted by column": Wrong(
            _shifted_by_column,
            "you take off s_jj; broadcasting needs the diagonal as a column, so that row i loses s_ii.",
        ),
        "base 10": Wrong(_other_base, "you take the logarithm to base 10; here log is the natural one."),
        "base 2": Wrong(_base_two, "you take the logarithm to base 2; here log is the natural one."),
        "no log": Wrong(_no_log, "this is g, the mean itself; its logarithm is asked for."),
        "mean of logs": Wrong(
            _mean_of_logs,
            "the log of a mean of exponentials is not the mean of the exponents: exp first, then mean, then log.",
        ),
        "overflow": Wrong(
            _overflows,
            "right until exp overflows: at tau = 0.01 the exponent reaches 200, and float32 ends at 88.7. "
            "Use torch.logsumexp, or take the largest exponent off first.",
        ),
    },
)
