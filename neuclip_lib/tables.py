"""Numbers kept per sample, spread over the ranks: rank r holds the samples with ``index % W == r``.

A look-up and a write need one sum over ranks of as many numbers as are looked up; no rank ever holds the whole table,
and the same code serves one rank and many.
"""

from __future__ import annotations

import torch
from torch import Tensor

from neuclip_lib.devices import free_memory
from neuclip_lib.ranks import ONE, Ranks


class Table:
    """``columns`` float numbers for each of n samples.

    Args:
        n: samples; an index is from 0 to n - 1.
        columns: numbers a sample.
        fill: their first value.
        ranks: over which the table is spread.
        device: where this rank's share lives.
        dtype: float32 in training; float64 in tests.

    Raises:
        ValueError: for n below 1.
        RuntimeError: before anything is allocated, when a rank's share is more than half of the free memory.
    """

    def __init__(
        self,
        n: int,
        columns: int,
        fill: float,
        ranks: Ranks = ONE,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        if n < 1:
            raise ValueError(f"a table needs at least 1 sample, got n={n}")
        self.n, self.columns, self.ranks = n, columns, ranks
        share = (n + ranks.size - 1 - ranks.rank) // ranks.size
        require_room(
            share * columns * dtype.itemsize, f"a table of {columns} numbers for each of {n:,} samples", device
        )
        # One more place than samples: it takes what belongs to other ranks, so shapes stay fixed and no host waits.
        self._storage = torch.full((columns, share + 1), fill, device=device, dtype=dtype)

    @property
    def values(self) -> Tensor:
        """This rank's share ``[columns, about n / W]``; sample i of it has the index ``i W + rank``."""
        return self._storage[:, :-1]

    def look_up(self, index: Tensor) -> Tensor:
        """The numbers of the samples ``index`` ``[B]``, which is the same on all ranks: ``[columns, B]``."""
        place, mine = self._place(index)
        found = self._storage[:, place]
        return self.ranks.sum(torch.where(mine, found, torch.zeros_like(found)))

    def write(self, index: Tensor, values: Tensor) -> None:
        """Put ``values`` ``[columns, B]`` at ``index``; the same on all ranks, equal where an index is repeated."""
        self._storage[:, self._place(index)[0]] = values.to(self._storage)

    def whole(self) -> Tensor:
        """The table ``[columns, n]`` on rank 0, for a checkpoint; empty on the others. All ranks must call it."""
        parts = self.ranks.collect(self.values.T.contiguous())
        if not parts:
            return self.values.new_empty(self.columns, 0)
        whole = parts[0].new_empty(self.columns, self.n)
        for rank, part in enumerate(parts):
            whole[:, rank :: self.ranks.size] = part.T
        return whole

    def load(self, whole: Tensor) -> None:
        """Take this rank's share of a table ``[columns, n]`` that any number of ranks has saved.

        Raises:
            ValueError: for a table of another size.
        """
        if whole.shape != (self.columns, self.n):
            raise ValueError(
                f"the saved table is {list(whole.shape)}, this run's is [{self.columns}, {self.n}]; the data set must "
                "be the one of the saved run"
            )
        self.values.copy_(whole[:, self.ranks.rank :: self.ranks.size])

    def _place(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """Where the samples stand in this rank's share (the spare place for foreign ones), and which are its own."""
        mine = index % self.ranks.size == self.ranks.rank
        place = torch.div(index, self.ranks.size, rounding_mode="floor")
        return torch.where(mine, place, torch.full_like(place, self._storage.shape[1] - 1)), mine


def check_index(index: Tensor | None, n: int) -> None:
    """Refuse an index that does not name a sample; read on the host, so call it before training, not in a step.

    Raises:
        ValueError: naming the first wrong index, or saying that there is none.
    """
    if index is None:
        raise ValueError("this method keeps numbers per sample, so every batch needs the stable index of its samples")
    if index.is_floating_point() or index.dtype == torch.bool:
        raise ValueError(f"a sample index is an integer, got {index.dtype}")
    if bool((wrong := (index < 0) | (index >= n)).any()):
        first = int(index[wrong][0])
        raise ValueError(f"sample index {first} is out of range: the table was made for {n} samples, 0 to {n - 1}")


def require_room(needed: int, what: str, device: torch.device | str) -> None:
    """Refuse an allocation of more than half the free memory before it is made.

    Raises:
        RuntimeError: with both numbers.
    """
    free = free_memory(torch.device(device))
    if free is not None and needed > free / 2:
        raise RuntimeError(
            f"{what} takes {needed / 2**30:,.1f} GiB on each process, more than half of the {free / 2**30:,.1f} GiB "
            f"that are free on {device}; use more processes, or a method without numbers per sample (neuclip, amorlip)"
        )
