"""What is counted and not timed: memory of the loss, bytes of state, operators of an update."""

from __future__ import annotations

import shutil
from dataclasses import replace
from typing import Any

import torch
import torch._inductor.metrics as inductor_metrics
from torch.nn.functional import normalize

from neuclip_lib.bench.memory import peak_bytes
from neuclip_lib.contrast import GlobalBatch, log_mean_exp_over_negatives
from neuclip_lib.losses import Objective, global_contrastive_loss
from neuclip_lib.methods import METHODS, bytes_per_sample
from neuclip_lib.normalizers import PrototypeNormalizer, PrototypeOptions

TAU = torch.tensor(0.05)


def loss_memory(size: int, dim: int, keep: bool) -> float:
    """Peak of value and gradient of GCL, in units of one float32 matrix of ``size x size``."""
    generator = torch.Generator().manual_seed(0)
    e1, e2 = (normalize(torch.randn(size, dim, generator=generator), dim=1).requires_grad_() for _ in range(2))
    objective = Objective(1e-6, "tau")

    def call() -> None:
        batch = GlobalBatch(e1, e2, keep_similarities=keep)
        with torch.no_grad():
            log_g = log_mean_exp_over_negatives(e1, e2, batch, TAU)
        alpha = objective.log_eps_plus_g(log_g, size)
        global_contrastive_loss(e1, e2, alpha, batch, TAU, objective, log_g).backward()

    return peak_bytes(call) / (4 * size**2)


def memory_rows(rounds: int) -> list[dict[str, Any]]:
    """R4: peak memory of the loss in matrices of B x B; nothing is timed."""
    cases = (("whole", True, 2.2), ("chunked", False, 0.5))
    return [
        _counted("B=2048 d=64", f"{name}, matrices of B x B", round(loss_memory(2048, 64, keep), 3), target)
        for name, keep, target in cases
    ]


def state_rows(rounds: int) -> list[dict[str, Any]]:
    """R5: bytes of state a sample, asked of the methods' parts; nothing is timed."""
    keeping = {name: bytes_per_sample(method) for name, method in METHODS.items() if method.needs_index}
    rows = [_counted("bytes a sample", "neuclip", bytes_per_sample(METHODS["neuclip"]), 0)]
    rows += [_counted("bytes a sample", name, count, None) for name, count in keeping.items()]
    fixed = 2 * 2 * 4 * 512 * 4096  # prototypes and AdaGrad's sums of both sides, float32
    crossover = fixed / keeping["fastclip-v3"] / 1e6
    return [*rows, _counted("m=4096 d=512", "million samples where v3's state is as large", round(crossover, 2), None)]


def operators_an_update(compiled: bool = False) -> tuple[int, int]:
    """Operators and fused kernels of one more update of both sides, and how many of them make the host wait.

    Raises:
        torch._inductor.exc.InductorError: when it should be compiled and there is no C++ compiler.
    """
    before = inductor_metrics.generated_kernel_count
    npn = PrototypeNormalizer(64, 64, PrototypeOptions(m=64, updates=1, restart_every=0, compiled=compiled))
    e = normalize(torch.randn(2, 64, 64, generator=torch.Generator().manual_seed(0)), dim=2)
    batch = GlobalBatch(e[0], e[1])
    log_g = log_mean_exp_over_negatives(e[0], e[1], batch, TAU)
    counts, waits = [], 0
    for updates in (1, 2):
        npn.options = replace(npn.options, updates=updates)
        npn.update(batch, log_g, TAU)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            npn.update(batch, log_g, TAU)
        names = [event.name for event in profile.events() if event.name.startswith("aten::") and _is_called(event)]
        counts.append(len(names))
        waits = sum(name in ("aten::item", "aten::_local_scalar_dense", "aten::nonzero") for name in names)
    fused = inductor_metrics.generated_kernel_count - before
    return counts[1] - counts[0] + fused, waits


def _is_called(event: Any) -> bool:
    """Called by our code or the optimizer, not by another operator."""
    return event.cpu_parent is None or not event.cpu_parent.name.startswith("aten::")


def operator_rows(rounds: int) -> list[dict[str, Any]]:
    """R8: operators of one update of the prototypes, both sides, and those that ``torch.compile`` leaves."""
    operators, waits = operators_an_update()
    case = "B=64 d=64 m=64"
    rows = [_counted(case, "operators", operators, 68), _counted(case, "waits of the host", waits, 0)]
    if shutil.which("g++") is None:
        print("R8, compiled, needs a C++ compiler and is left out")
        return rows
    return [*rows, _counted(case, "operators and fused kernels, compiled", operators_an_update(compiled=True)[0], 20)]


def _counted(case: str, variant: str, value: float, target: float | None) -> dict[str, Any]:
    return {"case": case, "variant": variant, "ratio": value, "target": target, "iqr": None}
