"""Two small towers on plain vectors, and one step of any method on them: for studies that need no image or text."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from neuclip_lib.contrast import GlobalBatch, Sides
from neuclip_lib.models.base import unit_rows
from neuclip_lib.normalizers import Normalizer
from neuclip_lib.parts import Parts


class TwoTowers(nn.Module):
    """A tower a side, of vectors into one space.

    Args:
        widths: lengths of an image's and a text's vector.
        hidden: width of the one hidden layer of ReLUs; None for a linear map.
        dim: embedding dimension d.
        seed: of the weights; the global random state is left as it is.
    """

    def __init__(self, widths: tuple[int, int], hidden: int | None, dim: int, seed: int) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            self.image, self.text = (_tower(width, hidden, dim) for width in widths)

    def forward(self, x1: Tensor, x2: Tensor) -> Sides:
        """Unit rows ``[b, d]`` of vectors ``[b, width]`` a side."""
        return unit_rows(self.image(x1)), unit_rows(self.text(x2))


def _tower(width: int, hidden: int | None, dim: int) -> nn.Module:
    if hidden is None:
        return nn.Linear(width, dim)
    return nn.Sequential(nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, dim))


def learn(
    towers: TwoTowers,
    x: Sides,
    index: Tensor,
    parts: Parts,
    shadows: Iterable[Normalizer],
    tau: Tensor,
    optimizer: torch.optim.Optimizer,
) -> float:
    """One training step of a method at a fixed tau; the shadows see its batch and steer nothing.

    Args:
        x: all vectors ``[n, width]`` a side.
        index: the batch's places among them, ``[B]``.

    Returns:
        The loss of the batch.

    Raises:
        RuntimeError: when it is not finite; the weights are as they were.
    """
    e1, e2 = towers(x[0][index], x[1][index])  # [B, d]
    batch = GlobalBatch(e1, e2, index)
    outcome = parts.loss(e1, e2, batch, tau)
    if not bool(torch.isfinite(outcome.loss)):
        raise RuntimeError("the loss of a batch is not finite: the run has diverged; lower the learning rate")
    optimizer.zero_grad()
    outcome.loss.backward()
    optimizer.step()
    if outcome.log_g is not None:
        for shadow in shadows:
            shadow.update(batch, outcome.log_g, tau)
    return float(outcome.loss.detach())
