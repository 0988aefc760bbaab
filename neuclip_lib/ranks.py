"""What the processes of one run exchange; here for a single process, where every exchange is the identity.

Everything below the trainer calls these few functions and never asks how many processes there are. The kind with real
processes behind it is made by ``training.distributed``.
"""

from __future__ import annotations

from torch import Tensor


class Ranks:
    """A single process. Every rank must make the same calls in the same order, with tensors of the same shape.

    Attributes:
        rank: number of this process, from 0.
        size: number of processes W.
    """

    rank: int = 0
    size: int = 1

    def gather(self, part: Tensor) -> Tensor:
        """All ranks' ``[b, ...]`` as ``[W b, ...]`` in the order of ranks, detached."""
        return part.detach()

    def sum(self, x: Tensor) -> Tensor:
        """Sum over ranks, the same shape; ``x`` may be overwritten."""
        return x

    def mean(self, x: Tensor) -> Tensor:
        """Mean over ranks, the same shape; ``x`` may be overwritten."""
        return self.sum(x) / self.size if self.size > 1 else x

    def max(self, x: Tensor) -> Tensor:
        """Largest value over ranks, the same shape; ``x`` may be overwritten."""
        return x

    def sum_own_rows(self, x: Tensor) -> Tensor:
        """This rank's ``[b, ...]`` rows of the sum over ranks of ``[W b, ...]``."""
        return x

    def collect(self, part: Tensor) -> list[Tensor]:
        """Every rank's part, of any length along the first dimension, on rank 0; an empty list on the others."""
        return [part]


ONE = Ranks()
"""The exchange of a single process."""
