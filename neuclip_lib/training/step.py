"""The training step, the same for every method, and the guard that stops it before a non-finite update."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from neuclip_lib.contrast import Sides, log_mean_exp_over_negatives
from neuclip_lib.losses import global_contrastive_loss
from neuclip_lib.methods import Parts
from neuclip_lib.models import ImageTextModel
from neuclip_lib.normalizers import Normalizer
from neuclip_lib.temperature import Temperature
from neuclip_lib.training.distributed import gather
from neuclip_lib.training.feed import Batch
from neuclip_lib.training.optim import encoder_gradient_norm


@dataclass
class Trainee:
    """What a run changes: the encoders, the temperature, the normalizers and the optimizer that moves the first two.

    ``shadows`` are normalizers that see every batch and steer nothing.
    """

    model: ImageTextModel
    temperature: Temperature
    parts: Parts
    shadows: Mapping[str, Normalizer]
    optimizer: torch.optim.Optimizer

    def state(self) -> dict[str, Any]:
        """Everything but the encoders' weights, as tensors and plain values."""
        return {
            "temperature": self.temperature.state_dict(),
            "normalizer": self.parts.normalizer.state_dict(),
            "shadows": {name: shadow.state_dict() for name, shadow in self.shadows.items()},
            "optimizer": self.optimizer.state_dict(),
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Take back what :meth:`state` gave."""
        self.temperature.load_state_dict(state["temperature"])
        self.parts.normalizer.load_state_dict(state["normalizer"])
        for name, shadow in self.shadows.items():
            shadow.load_state_dict(state["shadows"][name])
        self.optimizer.load_state_dict(state["optimizer"])


@dataclass
class Seen:
    """What one step saw, detached: for the record and for the message when something breaks."""

    loss: Tensor
    log_g: Sides
    alpha: Sides
    log_eps_plus_g: Sides
    tau: Tensor
    lengths: Sides
    index: Tensor
    gradient_norm: Tensor


class NonFinite(Exception):
    """A step (0 is the first) whose loss or gradient is not finite; it changed neither weights nor optimizer."""

    def __init__(self, step: int, seen: Seen) -> None:
        super().__init__(f"the loss or its gradient is not finite in step {step}")
        self.step, self.seen = step, seen


class Guard:
    """Looks at every step's loss and gradient before they reach the weights.

    On the CPU it raises at once. On CUDA reading a number would make the host wait, so a flag stays on the device: from
    the first bad step on the optimizer leaves the weights alone, and :meth:`check` raises when it is asked. The
    normalizer goes on seeing batches until then.

    Args:
        device: of the run.
        optimizer: a fused one where the guard does not raise at once.
        raises_at_once: not on CUDA, if not given.
    """

    def __init__(
        self, device: torch.device, optimizer: torch.optim.Optimizer, raises_at_once: bool | None = None
    ) -> None:
        self.raises_at_once = device.type != "cuda" if raises_at_once is None else raises_at_once
        self.bad = torch.zeros((), device=device)
        self.unchecked: list[tuple[int, Seen]] = []
        if not self.raises_at_once:
            # Fused optimizers skip their update on the device while this tensor is not zero.
            optimizer.found_inf = self.bad  # type: ignore[attr-defined]

    def look(self, step: int, seen: Seen) -> None:
        """Raise NonFinite for a bad step, or remember it."""
        if self.raises_at_once:
            if not bool(_healthy(seen)):
                raise NonFinite(step, seen)
            return
        self.bad.logical_or_(~_healthy(seen))
        self.unchecked.append((step, seen))

    def check(self) -> None:
        """Raise NonFinite for the first bad step since the last check; waits for the device."""
        if bool(self.bad):
            raise NonFinite(*next(pair for pair in self.unchecked if not bool(_healthy(pair[1]))))
        self.unchecked.clear()


def _healthy(seen: Seen) -> Tensor:
    return torch.isfinite(seen.loss) & torch.isfinite(seen.gradient_norm)


def train_step(
    trainee: Trainee, batch: Batch, guard: Guard, step: int, precision: str = "float32", clip_norm: float | None = None
) -> Seen:
    """One step of any method; learning rates are set beforehand.

    Raises:
        NonFinite: on the CPU, with the weights, the optimizer and the normalizers as they were before the step.
    """
    model, temperature, parts = trainee.model, trainee.temperature, trainee.parts
    before = parts.normalizer.state_dict() if guard.raises_at_once else {}
    temperature.project()
    tau = temperature()
    e1, e2 = encode(model, batch, precision)  # [b, d], unit rows, float32
    everyone = gather(e1, e2, batch.index)  # [B, d], detached
    log_g = log_mean_exp_over_negatives(e1, e2, everyone, tau)  # [b] a side
    parts.normalizer.update(everyone, log_g, tau)
    alpha = parts.alpha(e1, e2, log_g, everyone, tau)  # [b] a side: the only line that differs between methods
    loss = global_contrastive_loss(e1, e2, alpha, everyone, tau, parts.objective, log_g)
    trainee.optimizer.zero_grad()
    loss.backward()
    norm = encoder_gradient_norm(model, clip_norm)
    seen = _seen(loss, log_g, alpha, parts, tau, (e1, e2), batch.index, norm)
    try:
        guard.look(step, seen)
    except NonFinite:
        parts.normalizer.load_state_dict(before)
        raise
    for shadow in trainee.shadows.values():
        shadow.update(everyone, seen.log_g, seen.tau)
    trainee.optimizer.step()
    return seen


def encode(model: ImageTextModel, batch: Batch, precision: str) -> Sides:
    """Unit embeddings of a batch, each ``[b, d]`` and float32: bfloat16 similarities would be off by .1 in log g."""
    lower = torch.autocast(batch.images.device.type, torch.bfloat16, enabled=precision == "bfloat16")
    with lower:
        return model.encode_image(batch.images), model.encode_text(batch.tokens)


@torch.no_grad()
def _seen(
    loss: Tensor, log_g: Sides, alpha: Sides, parts: Parts, tau: Tensor, e: Sides, index: Tensor, norm: Tensor
) -> Seen:
    log_g, alpha = (log_g[0].detach(), log_g[1].detach()), (alpha[0].detach(), alpha[1].detach())
    lengths = e[0].detach().norm(dim=1), e[1].detach().norm(dim=1)
    exact = parts.objective.log_eps_plus_g(log_g, len(e[0]))
    return Seen(loss.detach(), log_g, alpha, exact, tau.detach(), lengths, index, norm.detach())
