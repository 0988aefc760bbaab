"""Whole training steps: what NeuCLIP adds to OpenCLIP's, and how near a step is to the machine's matrix product."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from neuclip_lib import presets
from neuclip_lib.bench.timing import paired_ratios, rows_of
from neuclip_lib.models import build_model
from neuclip_lib.training.build import Samples, build_trainee
from neuclip_lib.training.feed import Batch
from neuclip_lib.training.step import Guard, train_step

SIZE = 256
CASES = (("nano", 512, 1.15), ("micro", 1024, 1.05))
STEPS_AN_EPOCH = 10


def stepping(method: str, model_name: str, m: int, size: int = SIZE) -> Callable[[], object]:
    """A call that trains one step on random pictures; the prototypes are filled before it is given out."""
    texts = [" ".join(words) for words in itertools.permutations(("red", "green", "blue", "circle", "square"), 3)]
    prototypes: dict[str, Any] = {"prototypes.m": m, "prototypes.updates": 10, "prototypes.restart_every": 500}
    config = presets.laptop(method, model=model_name, batch_size=size, **prototypes)
    model = build_model(model_name, texts, 32, seed=0)
    generator = torch.Generator().manual_seed(0)
    tokens = model.tokenize([texts[k % len(texts)] for k in range(size)])
    batch = Batch(torch.randn(size, 3, 32, 32, generator=generator), tokens, torch.arange(size))
    device = torch.device("cpu")
    trainee = build_trainee(config, model, device, Samples(size * STEPS_AN_EPOCH, STEPS_AN_EPOCH))
    guard, numbers = Guard(device, trainee.optimizer), itertools.count()

    def call() -> None:
        train_step(trainee, batch, guard, next(numbers))

    for _ in range(-(-m // size)):
        call()
    return call


def step_ratios(rounds: int) -> list[dict[str, Any]]:
    """R1 and R1b: a NeuCLIP step over an OpenCLIP step, B = 256, T_u = 10."""
    rows = []
    for model, m, target in CASES:
        openclip = stepping("openclip", model, m)
        variants: dict[str, Callable[[], object]] = {
            "openclip": openclip,
            "openclip again (A/A)": openclip,
            "neuclip": stepping("neuclip", model, m),
        }
        case = f"{model} B={SIZE} m={m}"
        rows += rows_of(case, paired_ratios(variants, "openclip", rounds), "openclip", {"neuclip": target})
    return rows


def efficiency_ratios(rounds: int) -> list[dict[str, Any]]:
    """R9: floating-point operations a CPU second in a step of ``micro``, over those of a 1024 x 1024 product."""
    step = stepping("neuclip", "micro", 1024)
    a, b = torch.randn(1024, 1024), torch.randn(1024, 1024)
    with FlopCounterMode(display=False) as counter:
        step()
    work = counter.get_total_flops() / (2 * 1024**3)
    product: Callable[[], object] = lambda: torch.mm(a, b)
    variants = {"product": product, "product again (A/A)": product, "step": step}
    found = paired_ratios(variants, "product", rounds)
    # The time ratio says how many products a step takes; its operations say how many it is worth.
    step_time = found.pop("step")
    rows = rows_of("micro B=256", found, "product", {})
    low, high = sorted((work / step_time.low, work / step_time.high))
    figures = {"ratio": round(work / step_time.median, 3), "target": 0.55, "iqr": [round(low, 3), round(high, 3)]}
    return [*rows, {"case": "micro B=256", "variant": "operations a second, step / product", **figures}]
