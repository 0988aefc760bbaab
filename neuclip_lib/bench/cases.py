"""The tables of the benchmark: what is compared with what, at which sizes, and which ratio is wanted."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize

from neuclip_lib.bench.exact import memory_rows, operator_rows, state_rows
from neuclip_lib.bench.steps import efficiency_ratios, step_ratios
from neuclip_lib.bench.timing import paired_ratios, rows_of
from neuclip_lib.bench.two_ranks import two_rank_rows
from neuclip_lib.contrast import GlobalBatch, log_mean_exp_over_negatives
from neuclip_lib.losses import Objective, global_contrastive_loss
from neuclip_lib.normalizers import PrototypeNormalizer, PrototypeOptions

TAU = torch.tensor(0.05)


def _pair(size: int, dim: int) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    e1, e2 = (normalize(torch.randn(size, dim, generator=g), dim=1) for _ in range(2))
    return e1.requires_grad_(), e2.requires_grad_()


def _ours(e1: Tensor, e2: Tensor, objective: Objective) -> None:
    e1.grad = e2.grad = None
    batch = GlobalBatch(e1, e2)
    log_g = log_mean_exp_over_negatives(e1, e2, batch, TAU)
    alpha = objective.log_eps_plus_g((log_g[0].detach(), log_g[1].detach()), batch.size)
    global_contrastive_loss(e1, e2, alpha, batch, TAU, objective, log_g).backward()


def loss_ratios(rounds: int) -> list[dict[str, Any]]:
    """Value and gradient of our losses over open_clip's ``ClipLoss``."""
    from open_clip.loss import ClipLoss

    rows = []
    for size, dim, target in ((1024, 512, 0.58), (1024, 64, 0.62)):
        e1, e2 = _pair(size, dim)
        reference = ClipLoss()

        def theirs(e1: Tensor = e1, e2: Tensor = e2, reference: Any = reference) -> None:
            e1.grad = e2.grad = None
            reference(e1, e2, 1 / TAU).backward()

        variants: dict[str, Callable[[], object]] = {
            "open_clip": theirs,
            "open_clip again (A/A)": theirs,
            "ours, InfoNCE": partial(_ours, e1, e2, Objective(None, "one")),
            "ours, GCL": partial(_ours, e1, e2, Objective(1e-6, "tau")),
            "3 bare products": _bare_products(e1.detach(), e2.detach(), 3),
        }
        rows += _rows(
            f"B={size} d={dim}", variants, "open_clip", rounds, {"ours, InfoNCE": target, "ours, GCL": target}
        )
    return rows


def _bare_products(a: Tensor, b: Tensor, count: int) -> Callable[[], object]:
    """``count`` products of B x B x d (or B x m x d), the floor of any form."""
    s = a @ b.T

    def call() -> None:
        for k in range(count):
            torch.mm(a, b.T) if k % 2 == 0 else torch.mm(s, b)

    return call


def prototype_ratios(rounds: int) -> list[dict[str, Any]]:
    """The ten updates of a step over naive autograd, and over four bare products an update."""
    rows = []
    for size, dim, m, over_naive, over_bare in (
        (256, 64, 512, 0.55, 1.8),
        (1024, 64, 4096, 0.70, 1.5),
        (256, 512, 4096, 0.75, 1.3),
    ):
        e1, e2 = (e.detach() for e in _pair(size, dim))
        ours = _updating(e1, e2, m, updates=10)
        variants: dict[str, Callable[[], object]] = {
            "naive autograd": _times(10, _naive_update(e1, e2, m)),
            "4 bare products": _bare_products(e1, normalize(torch.randn(m, dim), dim=1), 4 * 10),
            "ours": ours,
        }
        case = f"B={size} d={dim} m={m}"
        rows += _rows(case, variants, "naive autograd", rounds, {"ours": over_naive})
        rows += _rows(case + " over products", variants, "4 bare products", rounds, {"ours": over_bare})
    return rows


def _updating(e1: Tensor, e2: Tensor, m: int, updates: int) -> Callable[[], object]:
    """The inner updates alone: the filling is done before the clock starts."""
    options = PrototypeOptions(m=m, updates=0, restart_every=0)
    npn = PrototypeNormalizer(e1.shape[1], len(e1), options)
    batch = GlobalBatch(e1, e2)
    log_g = log_mean_exp_over_negatives(e1, e2, batch, TAU)
    for k in range(math.ceil(m / len(e1))):
        noise = torch.randn(len(e1), e1.shape[1], generator=torch.Generator().manual_seed(k))
        other = GlobalBatch(normalize(e1 + noise, dim=1), normalize(e2 - noise, dim=1))
        npn.update(other, log_g, TAU)
    e, positive, log_x = torch.stack((e1, e2)), (e1 * e2).sum(1), torch.stack(log_g)

    npn.options = replace(options, updates=updates)
    return lambda: npn._descend(e, positive, log_x, TAU)


def _naive_update(e1: Tensor, e2: Tensor, m: int) -> Callable[[], object]:
    """What one writes first: the objective with autograd and torch's default AdaGrad."""
    g = torch.Generator().manual_seed(1)
    w = [torch.randn(e1.shape[1], m, generator=g).requires_grad_() for _ in range(2)]
    optimizer = torch.optim.Adagrad(w, lr=1e-2)
    batch = GlobalBatch(e1, e2)
    log_g = [side.detach() for side in log_mean_exp_over_negatives(e1, e2, batch, TAU)]

    def call() -> None:
        optimizer.zero_grad()
        loss = torch.zeros(())
        for e, columns, side in ((e1, w[0], log_g[0]), (e2, w[1], log_g[1])):
            x = (e @ normalize(columns, dim=0) - (e1 * e2).sum(1, keepdim=True)) / TAU
            alpha = torch.log(1e-6 + torch.exp(x).mean(1))
            loss = loss + TAU * (torch.exp(-alpha) * (1e-6 + torch.exp(side)) + alpha - 1).mean() / 2
        loss.backward()
        optimizer.step()

    return call


def _times(count: int, call: Callable[[], object]) -> Callable[[], object]:
    def repeated() -> None:
        for _ in range(count):
            call()

    return repeated


def scaling_ratios(rounds: int) -> list[dict[str, Any]]:
    """How the cost of the prototypes grows with T_u and with m."""
    e1, e2 = (e.detach() for e in _pair(256, 64))
    by_updates: dict[str, Callable[[], object]] = {
        "T_u=10": _updating(e1, e2, 512, 10),
        "T_u=20": _updating(e1, e2, 512, 20),
    }
    by_m: dict[str, Callable[[], object]] = {"m=1024": _updating(e1, e2, 1024, 1), "m=4096": _updating(e1, e2, 4096, 1)}
    rows = _rows("B=256 d=64 m=512", by_updates, "T_u=10", rounds, {"T_u=20": 2.1})
    return rows + _rows("B=256 d=64 T_u=1", by_m, "m=1024", rounds, {"m=4096": 4.2})


def _rows(
    case: str, variants: dict[str, Callable[[], object]], reference: str, rounds: int, targets: dict[str, float]
) -> list[dict[str, Any]]:
    return rows_of(case, paired_ratios(variants, reference, rounds), reference, targets)


TABLES: dict[str, Callable[[int], list[dict[str, Any]]]] = {
    "R1": step_ratios,
    "R2": loss_ratios,
    "R3": prototype_ratios,
    "R4": memory_rows,
    "R5": state_rows,
    "R6": scaling_ratios,
    "R7": two_rank_rows,
    "R8": operator_rows,
    "R9": efficiency_ratios,
}


def run_tables(names: list[str], rounds: int) -> dict[str, list[dict[str, Any]]]:
    """Run the named tables on one thread and return their rows."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return {name: TABLES[name](rounds) for name in names}
    finally:
        torch.set_num_threads(threads)
