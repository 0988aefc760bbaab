"""The training step, the same for every method, and the guard that stops it before a non-finite update."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from neuclip_lib.contrast import GlobalBatch, Sides, log_mean_exp_over_negatives
from neuclip_lib.models import ImageTextModel
from neuclip_lib.normalizers import Normalizer
from neuclip_lib.parts import Outcome, Parts
from neuclip_lib.ranks import ONE, Ranks
from neuclip_lib.temperature import AnyTemperature
from neuclip_lib.training.distributed import average_gradients, gather
from neuclip_lib.training.feed import Batch
from neuclip_lib.training.optim import encoder_gradient_norm
from neuclip_lib.training.precision import LOWER, LossScale, Precision


@dataclass
class Trainee:
    """What a run changes: the encoders, the temperature, the normalizers and the optimizer that moves them.

    ``shadows`` are normalizers that see every batch and steer nothing. ``encoders`` is the model as it is called in
    training: wrapped where there are several ranks.
    """

    model: ImageTextModel
    temperature: AnyTemperature
    parts: Parts
    shadows: Mapping[str, Normalizer]
    optimizer: torch.optim.Optimizer
    scale: LossScale
    ranks: Ranks = ONE
    encoders: nn.Module = field(default=None)  # type: ignore[assignment]

    def __post_init__(self) -> None:
        if self.encoders is None:
            self.encoders = self.model

    def state(self) -> dict[str, Any]:
        """Everything but the encoders' weights, as tensors and plain values; every rank must call it.

        What is spread over the ranks is whole on rank 0 alone.
        """
        normalizer = self.parts.normalizer
        return {
            "temperature": dict(self.temperature.state_dict()),
            "normalizer": {} if normalizer is None else normalizer.state_dict(),
            "learned": dict(self.parts.learned.state_dict()),
            "shadows": {name: shadow.state_dict() for name, shadow in self.shadows.items()},
            "optimizer": self.optimizer.state_dict(),
            "scale": self.scale.state_dict(),
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Take back what :meth:`state` gave on rank 0, on any number of ranks."""
        self.temperature.load_state_dict(state["temperature"])
        if self.parts.normalizer is not None:
            self.parts.normalizer.load_state_dict(state["normalizer"])
        self.parts.learned.load_state_dict(state["learned"])
        for name, shadow in self.shadows.items():
            shadow.load_state_dict(state["shadows"][name])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scale.load_state_dict(state["scale"])


@dataclass
class Seen:
    """What one step saw, detached: for the record and for the message when something breaks.

    ``loss`` and ``gradient_norm`` are the same on every rank; log_g, alpha and log_eps_plus_g are those of this rank's
    anchors, None for a loss without a normalizer; ``index`` is that of the whole batch.
    """

    loss: Tensor
    log_g: Sides | None
    alpha: Sides | None
    log_eps_plus_g: Sides | None
    tau: Tensor
    lengths: Sides
    index: Tensor
    gradient_norm: Tensor
    overflowed: Tensor


class Diverged(RuntimeError):
    """A run that cannot go on because its loss or gradient is not finite; nothing else is wrong with it."""


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
        self.optimizer = optimizer
        self.bad = torch.zeros((), device=device)
        self.unchecked: list[tuple[int, Seen]] = []

    def look(self, step: int, seen: Seen) -> None:
        """Raise NonFinite for a bad step, or remember it; tell the optimizer whether to leave the weights alone."""
        if self.raises_at_once:
            if not bool(_healthy(seen)):
                raise NonFinite(step, seen)
        else:
            self.bad.logical_or_(~_healthy(seen))
            self.unchecked.append((step, seen))
        # Fused optimizers skip their update on the device while this tensor is not zero.
        self.optimizer.found_inf = torch.maximum(self.bad, seen.overflowed.to(self.bad))  # type: ignore[attr-defined]

    def check(self) -> None:
        """Raise NonFinite for the first bad step since the last check; waits for the device."""
        if bool(self.bad):
            raise NonFinite(*next(pair for pair in self.unchecked if not bool(_healthy(pair[1]))))
        self.unchecked.clear()


def _healthy(seen: Seen) -> Tensor:
    """A float16 overflow is no failure: the step is skipped and the scale lowered."""
    return torch.isfinite(seen.loss) & (torch.isfinite(seen.gradient_norm) | seen.overflowed)


def train_step(
    trainee: Trainee,
    batch: Batch,
    guard: Guard,
    step: int,
    precision: Precision = "float32",
    clip_norm: float | None = None,
) -> Seen:
    """One step of any method; learning rates are set beforehand.

    A float16 step that overflows changes neither weights, temperatures nor optimizer; the normalizer saw its batch.

    Args:
        batch: this rank's share of the global batch.

    Raises:
        NonFinite: on the CPU, with the weights, the optimizer and the normalizers as they were before the step.
    """
    temperature, parts = trainee.temperature, trainee.parts
    temperature.begin(step)
    e1, e2 = encode(trainee.encoders, batch, precision)  # [b, d], unit rows, float32
    everyone = gather(e1, e2, batch.index, trainee.ranks)  # [B, d], detached
    tau = temperature(everyone)
    undo = _remember(parts.normalizer, everyone, guard)
    outcome = parts.loss(e1, e2, everyone, tau)  # log_g, the normalizer's update, alpha, the loss: see parts.py
    trainee.optimizer.zero_grad()
    trainee.scale.scaled(outcome.loss).backward()
    average_gradients([*temperature.parameters(), *parts.learned.parameters()], trainee.ranks)
    trainee.scale.unscale(_gradients(trainee, tau))
    norm = encoder_gradient_norm(trainee.model, clip_norm)
    seen = _seen(outcome, tau, (e1, e2), everyone, norm, trainee)
    try:
        guard.look(step, seen)
    except NonFinite:
        undo()
        raise
    for shadow in trainee.shadows.values():
        shadow.update(everyone, seen.log_g or _log_g(e1, e2, everyone, tau), seen.tau)
    trainee.optimizer.step()
    temperature.finish(tau, everyone, skip=guard.optimizer.found_inf > 0)  # type: ignore[attr-defined]
    trainee.scale.after(seen.overflowed)
    return seen


def encode(encoders: nn.Module, batch: Batch, precision: Precision) -> Sides:
    """Unit embeddings of a batch, each ``[b, d]`` and float32: bfloat16 similarities would be off by .1 in log g."""
    with torch.autocast(batch.images.device.type, LOWER[precision], enabled=precision != "float32"):
        return encoders(batch.images, batch.tokens)


def _remember(normalizer: Normalizer | None, batch: GlobalBatch, guard: Guard) -> Callable[[], None]:
    """A way back for a guard that raises at once; elsewhere nothing is taken back and nothing is copied."""
    return normalizer.remember(batch) if normalizer is not None and guard.raises_at_once else lambda: None


def _gradients(trainee: Trainee, tau: Tensor) -> list[Tensor]:
    """All that backward has made, a per-sample tau's included."""
    parameters = [p for group in trainee.optimizer.param_groups for p in group["params"]]
    leaves = [*parameters, tau] if tau.is_leaf and tau.ndim else parameters
    return [leaf.grad for leaf in leaves if leaf.grad is not None]


@torch.no_grad()
def _log_g(e1: Tensor, e2: Tensor, batch: GlobalBatch, tau: Tensor) -> Sides:
    """For shadows of a loss that needs no log_g itself."""
    return log_mean_exp_over_negatives(e1, e2, batch, tau)


@torch.no_grad()
def _seen(outcome: Outcome, tau: Tensor, e: Sides, batch: GlobalBatch, norm: Tensor, trainee: Trainee) -> Seen:
    loss = trainee.ranks.mean(outcome.loss.detach().clone())
    lengths = e[0].detach().norm(dim=1), e[1].detach().norm(dim=1)
    assert batch.index is not None
    norm = norm.detach()
    overflowed = ~torch.isfinite(norm) if trainee.scale.active else torch.zeros_like(norm, dtype=torch.bool)
    # Below its least value the scale cannot be what broke the gradient.
    overflowed = overflowed & (trainee.scale.scale >= trainee.scale.LEAST)
    return Seen(
        loss,
        outcome.log_g,
        outcome.alpha,
        outcome.log_eps_plus_g,
        tau.detach(),
        lengths,
        batch.index,
        norm,
        overflowed,
    )
