"""The doctor's self-test: a few seconds that exercise the loss, the trainer and the disk."""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass

TOLERANCE = 1e-5
"""Of the loss's value, relative, and of its gradients in units of their largest entry, in float32."""


@dataclass(frozen=True)
class Outcome:
    """Whether a test passed, and what was measured."""

    passed: bool
    text: str


def loss_equals_open_clips() -> Outcome:
    """Value and gradients of our InfoNCE against ``ClipLoss`` of open_clip, on every kind of device."""
    import torch

    kinds = ["cpu"]
    kinds += ["cuda"] if torch.cuda.is_available() else []
    kinds += ["mps"] if torch.backends.mps.is_available() else []
    errors = {kind: _loss_error(kind) for kind in kinds}
    text = ", ".join(f"{error:.0e} on {kind}" for kind, error in errors.items())
    return Outcome(all(error <= TOLERANCE for error in errors.values()), f"relative difference {text}")


def _loss_error(device: str) -> float:
    import torch
    from open_clip.loss import ClipLoss
    from torch.nn.functional import normalize

    from neuclip_lib.losses import info_nce

    generator = torch.Generator().manual_seed(0)
    images, texts = (torch.randn(64, 32, generator=generator).to(device) for _ in range(2))
    tau = torch.tensor(0.07, device=device)
    results = []
    for loss_of in (lambda e1, e2: info_nce(e1, e2, tau), lambda e1, e2: ClipLoss()(e1, e2, 1 / tau)):
        e1, e2 = (normalize(side, dim=1).requires_grad_() for side in (images, texts))
        loss = loss_of(e1, e2)
        results.append([loss.detach(), *torch.autograd.grad(loss, (e1, e2))])
    ours, theirs = results
    return max(((a - b).abs().max() / b.abs().max()).item() for a, b in zip(ours, theirs, strict=True))


def training_works() -> Outcome:
    """A run of twenty steps in a temporary folder, and its encoders back from the checkpoint."""
    from neuclip_lib import presets
    from neuclip_lib.training import train

    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="neuclip-doctor-") as folder:
        run = train(presets.tiny(), folder, quiet=True)
        run.load_model()
        losses = [row["loss"] for row in run.metrics("probe")]
    text = (
        f"{run.config.steps} steps in {time.monotonic() - begun:.1f} s, probe loss {losses[0]:.3f} to {losses[-1]:.3f}"
    )
    # Equal embeddings give 0, so a run that has collapsed does not pass for one that has learned.
    return Outcome(all(map(math.isfinite, losses)) and losses[-1] < min(0.0, losses[0]), text)


TESTS: dict[str, Callable[[], Outcome]] = {
    "loss": loss_equals_open_clips,
    "training": training_works,
}
