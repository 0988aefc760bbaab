"""What every normalizer offers: it observes batches, and it answers with alpha."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from neuclip_lib.contrast import GlobalBatch, Sides


class Normalizer:
    """Where alpha comes from. A stateless one needs to override only ``__call__``.

    Attributes:
        needs_index: whether batches must carry a stable sample index.
        eps: the constant inside the logarithm of the estimate.
    """

    needs_index: bool = False
    eps: float = 0.0

    def update(self, batch: GlobalBatch, log_g: Sides, tau: Tensor) -> None:
        """Let the state see one global batch; gradients never flow through this.

        Args:
            batch: detached embeddings ``[B, d]`` of both sides.
            log_g: log mean over this batch's negatives, each ``[B]``; only the values are used.
            tau: temperature, a scalar tensor.
        """

    def __call__(self, e1: Tensor, e2: Tensor, log_g: Sides, batch: GlobalBatch, tau: Tensor) -> Sides:
        """Alpha of the anchors ``e1``, ``e2`` ``[b, d]``, each ``[b]``: a constant, or differentiable."""
        raise TypeError(f"{type(self).__name__} does not say how alpha is computed")

    def state_dict(self) -> dict[str, Any]:
        """Everything that a resumed run needs, as tensors and plain values."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what ``state_dict`` gave.

        Raises:
            ValueError: when the state belongs to a normalizer of another kind or size.
        """
        if state:
            raise ValueError(f"{type(self).__name__} keeps no state, but was given {sorted(state)}")

    def bytes_for(self, n: int) -> int:
        """Bytes kept for a data set of ``n`` samples."""
        return 0
