"""What every normalizer offers: it observes batches, and it answers with alpha."""

from __future__ import annotations

from collections.abc import Callable
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

        Every rank calls it with the same batch, and all end with the same state (or their shares of it).

        Args:
            batch: detached embeddings ``[B, d]`` of both sides.
            log_g: log mean over this batch's negatives, of this rank's anchors, each ``[b]``; only values are used.
            tau: temperature: a scalar, or ``[2, B]`` for one a side and anchor, the same on every rank.
        """

    def remember(self, batch: GlobalBatch) -> Callable[[], None]:
        """A function that takes back the next ``update`` with ``batch``, for a step that must not have happened.

        It costs what the update touches, not what the whole state is.
        """
        return lambda: None

    def __call__(self, e1: Tensor, e2: Tensor, log_g: Sides, batch: GlobalBatch, tau: Tensor) -> Sides:
        """Alpha of this rank's anchors ``e1``, ``e2`` ``[b, d]``, each ``[b]``: a constant, or differentiable.

        Arguments as in ``update``; ``e1`` and ``e2`` are the rows of this rank's anchors with gradient.
        """
        raise TypeError(f"{type(self).__name__} does not say how alpha is computed")

    def state_dict(self) -> dict[str, Any]:
        """Everything that a resumed run needs, as tensors and plain values; every rank must call it.

        What is spread over the ranks is put together on rank 0 and empty on the others.
        """
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what ``state_dict`` gave on rank 0, on any number of ranks.

        Raises:
            ValueError: when the state belongs to a normalizer of another kind or size.
        """
        if state:
            raise ValueError(f"{type(self).__name__} keeps no state, but was given {sorted(state)}")

    def bytes_for(self, n: int) -> int:
        """Bytes kept for a data set of ``n`` samples."""
        return 0
