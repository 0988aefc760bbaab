"""The encoders' precision: autocast, and for float16 a scale that keeps small gradients from vanishing."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

Precision = Literal["float32", "bfloat16", "float16"]
LOWER = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class LossScale:
    """What the loss is multiplied by before the backward pass; an overflow skips the step and halves it.

    All on the device: the host never waits to learn whether a step overflowed, as the fused optimizer reads the flag
    itself. With float32 and bfloat16 encoders it is 1 for ever and no flag is looked at.

    Args:
        precision: of the encoders.
        device: of the loss.
        start: first scale.
        grow_after: steps without overflow before it doubles.
    """

    LEAST = 1.0
    """A scale that has fallen below it means that the gradient itself is not finite."""

    def __init__(
        self, precision: Precision, device: torch.device, start: float = 2.0**16, grow_after: int = 2000
    ) -> None:
        self.active = precision == "float16"
        self.grow_after = grow_after
        self.scale = torch.tensor(start if self.active else 1.0, device=device)
        self.steps = torch.zeros((), device=device)

    def scaled(self, loss: Tensor) -> Tensor:
        """The loss to call backward on."""
        return loss * self.scale if self.active else loss

    @torch.no_grad()
    def unscale(self, gradients: list[Tensor]) -> None:
        """Bring gradients back to the loss's own scale, in place."""
        if self.active and gradients:
            torch._foreach_mul_(gradients, 1 / self.scale)

    @torch.no_grad()
    def after(self, overflowed: Tensor) -> None:
        """Adapt the scale; ``overflowed`` is a 0-dim bool on the device."""
        if self.active:
            grown = self.steps + 1 >= self.grow_after
            self.scale = torch.where(overflowed, self.scale / 2, torch.where(grown, self.scale * 2, self.scale))
            self.steps = torch.where(overflowed | grown, torch.zeros_like(self.steps), self.steps + 1)

    def state_dict(self) -> dict[str, Any]:
        """Scale and count."""
        return {"scale": self.scale.clone(), "steps": self.steps.clone()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what ``state_dict`` gave; a run that was saved in another precision keeps its own start."""
        if self.active:
            self.scale.copy_(state["scale"])
            self.steps.copy_(state["steps"])
