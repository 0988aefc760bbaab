"""Synthetic pairs: two noisy views of one latent vector, any number of them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from neuclip_lib.contrast import Sides


@dataclass(frozen=True)
class LatentPairs:
    """Pair ``i`` has a latent ``z_i ~ N(0, I)`` and the views

        x1_i = tanh(A1 z_i) + noise n1_i,      x2_i = tanh(A2 z_i) + noise n2_i,      n ~ N(0, I),

    with ``A1``, ``A2`` of independent ``N(0, 4/latent)`` entries, drawn once: the matrices depend on the seed alone and
    are the same for every n.

    Args:
        latent: length of z.
        width: length of a view.
        noise: standard deviation of what a view has for itself.
    """

    latent: int = 16
    width: int = 64
    noise: float = 0.5

    def draw(self, n: int, seed: int) -> Sides:
        """``n`` pairs, float32 ``[n, width]`` a side; those of a smaller n are the first of a larger one."""
        maps, pairs = (torch.Generator().manual_seed(2 * seed + k) for k in (0, 1))
        a = torch.randn(2, self.latent, self.width, generator=maps) * 2 * self.latent**-0.5
        # A row at a time in memory: the latent, then the noise of both views.
        draw = torch.randn(n, self.latent + 2 * self.width, generator=pairs)
        z, noise1, noise2 = draw.split([self.latent, self.width, self.width], dim=1)
        return self._view(z, a[0], noise1), self._view(z, a[1], noise2)

    def _view(self, z: Tensor, a: Tensor, noise: Tensor) -> Tensor:
        return torch.tanh(z @ a) + self.noise * noise
