"""Three training steps of every method in float64, on however many processes there are; rank 0 saves what came out.

Started by test_agreement.py: alone, and by torchrun with 2, 3 and 4 processes. Everything goes through the trainer's
own ``train_step``, with DistributedDataParallel, on a transformer model. The small constants in the denominators of
AdamW, AdaGrad and the per-sample Adam are larger than usual, so that a gradient of rounding noise is not made a step.
"""

from __future__ import annotations

import sys
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from neuclip_lib import contrast, presets
from neuclip_lib.losses import global_contrastive
from neuclip_lib.methods import get_method, method_names
from neuclip_lib.models import build_model
from neuclip_lib.ranks import ONE, Ranks
from neuclip_lib.training import build, step
from neuclip_lib.training.build import Samples
from neuclip_lib.training.distributed import own_rows, process_group
from neuclip_lib.training.feed import Batch

SIZE, N, STEPS = 24, 40, 3
CPU = torch.device("cpu")


def variants() -> dict[str, tuple[str, dict[str, Any]]]:
    """Name -> (method, options): every method with its temperature learned, and every switch of NeuCLIP and AmorLIP."""
    found = {}
    for name in method_names():
        learned = get_method(name).tau == "free"
        found[name] = (name, {"temperature.learned": learned, "temperature.rho": 1.5 if learned else 0.0})
    for method in ("neuclip", "neuclip-mixed"):
        for detach in (False, True):
            for cap in (None, 1.5):
                options = {"prototypes.detach_alpha": detach, "weight_cap": cap, **found[method][1]}
                found[f"{method} detach={detach} cap={cap}"] = (method, options)
    # In its first step the prototypes are the batch itself and their gradient is 1e-11: more noise to keep from steps.
    found["neuclip m=30"] = ("neuclip", {"m": 30, "adagrad_eps": 1e-2, **found["neuclip"][1]})
    decaying = {"batch_share": 0.1, "share_decay_epochs": 3, **found["neuclip-mixed"][1]}
    found["neuclip-mixed decaying"] = ("neuclip-mixed", decaying)
    found["gcl-batch fixed"] = ("gcl-batch", {"temperature.learned": False})
    found["amorlip combined"] = ("amorlip", {"amortized.target": "combined", **found["amorlip"][1]})
    found["openclip clipped"] = ("openclip", {"optim.clip_norm": 0.1, **found["openclip"][1]})
    found["kcl riesz"] = ("kcl", {"kcl.kernel": "gaussian_riesz"})
    return found


def batches(ranks: Ranks) -> list[Batch]:
    """This rank's share of three shuffled batches; one sample is twice on a rank, one on two ranks."""
    g = torch.Generator().manual_seed(5)
    images = torch.rand(N, 3, 32, 32, generator=g, dtype=torch.float64) * 2 - 1
    tokens = torch.randint(1, 60, (N, 16), generator=g)
    made = []
    for _ in range(STEPS):
        index = torch.randperm(N, generator=g)[:SIZE]
        index[1], index[SIZE - 1] = index[0], index[2]
        own = index[own_rows(SIZE, ranks)]
        made.append(Batch(images[own], tokens[own], own))
    return made


def three_steps(method: str, options: dict[str, Any], ranks: Ranks) -> dict[str, Any]:
    """Gradients of every step; losses, norms, normalizer, temperature and weights after the last."""
    settings = {"data_options": {"n": 64}, "batch_size": SIZE, "m": 13, "prototypes.updates": 3, "restart_every": 2}
    settings |= {"optim.eps": 1e-3, "amortized.every": 1, "amortized.average": 0.5, "model": "nano"}
    settings |= {"adagrad_eps": 1e-4, "per_sample_eps": 1e-3}
    config = presets.tiny(method, **{**settings, **options})
    model = build_model("nano", [chr(97 + k) * 3 for k in range(26)], 32, seed=1).double()
    trainee = build.build_trainee(config, model, CPU, Samples(N, 2), ranks, torch.float64)
    for group in trainee.optimizer.param_groups:
        group["lr"] = 1e-3
    guard, seen, gradients = step.Guard(CPU, trainee.optimizer), [], []
    of_taus = recorded_tau_gradients(trainee)
    for number, batch in enumerate(batches(ranks)):
        result = step.train_step(trainee, batch, guard, number, clip_norm=config.optim.clip_norm)
        seen.append(torch.stack((result.loss, result.gradient_norm, result.tau.mean())))
        scalars = [*trainee.temperature.parameters(), *trainee.parts.learned.parameters()]
        named = {**dict(model.named_parameters()), **{f"scalar {k}": s for k, s in enumerate(scalars)}}
        gradients.append({name: p.grad.clone() for name, p in named.items() if p.grad is not None})
    state = trainee.state()
    return {
        "seen": torch.stack(seen),
        "gradients": gradients,
        "tau gradients": of_taus,
        "normalizer": {k: v for k, v in state["normalizer"].items() if k != "generator"},
        "temperature": state["temperature"],
        "weights": {name: p.detach().clone() for name, p in model.named_parameters()},
    }


def recorded_tau_gradients(trainee: step.Trainee) -> list[torch.Tensor]:
    """Per-sample temperatures: what ``finish`` is given, summed over ranks."""
    found: list[torch.Tensor] = []
    finish = trainee.temperature.finish

    def wrapped(tau, batch, skip=None):
        if tau.ndim:
            found.append(trainee.ranks.sum(tau.grad.clone()))
        finish(tau, batch, skip)

    trainee.temperature.finish = wrapped
    return found


@contextmanager
def broken(control: str | None):
    """The gradient with a mistake that people make; the comparison must see it."""
    products, whole = contrast._products, contrast.gradients_of_weighted_differences

    def no_column_part(batch, log_p, *rest):
        mine = torch.full_like(log_p, -torch.inf)
        mine[:, batch.rows] = log_p[:, batch.rows]
        return products(batch, mine, *rest)

    def pairs_twice(batch, log_p, inverse, *rest):
        d1, d2, moments = products(batch, log_p, inverse, *rest)
        for side, far, d, others in ((0, 1, d1, batch.e2), (1, 0, d2, batch.e1)):
            for rows, s in batch.blocks(side):
                p = torch.exp(log_p[far, batch.rows] + s[:, batch.rows] * inverse[far, batch.rows])
                d[rows] += p @ others[batch.rows]
        return d1, d2, moments

    def tau_attached(*arguments):
        d1, d2, d_tau = whole(*arguments)
        return d1, d2, 2 * d_tau

    if control == "no column part":
        contrast._products = no_column_part
    elif control == "pairs twice":
        contrast._products = pairs_twice
    elif control == "tau attached":
        global_contrastive.gradients_of_weighted_differences = tau_attached
    try:
        yield
    finally:
        contrast._products = products
        global_contrastive.gradients_of_weighted_differences = whole


CONTROLS = ("no column part", "pairs twice", "tau attached")


def everything(ranks: Ranks, controls: bool) -> dict[str, Any]:
    """All variants, and OpenCLIP and NeuCLIP with each mistake."""
    made = {name: three_steps(*variant, ranks) for name, variant in variants().items()}
    if controls:
        for control in CONTROLS:
            for name in ("openclip", "neuclip"):
                with broken(control):
                    made[f"{name}: {control}"] = three_steps(*variants()[name], ranks)
    return made


def main(out: Path) -> None:
    torch.set_num_threads(1)
    with process_group(CPU) as ranks:
        made = everything(ranks, controls=ranks.size == 2)
        if ranks.rank == 0:
            torch.save(made, out)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
else:
    assert ONE.size == 1
