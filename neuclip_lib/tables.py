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
        # The largest share, which is rank 0's: so all ranks refuse, or none.
        largest = (n + ranks.size - 1) // ranks.size
        require_room(
            largest * columns * dtype.itemsize, f"a table of {columns} numbers for each of {n:,} samples", device
        )
        share = (n + ranks.size - 1 - ranks.rank) // ranks.size
        # One more place than samples: it takes what belongs to other ranks, so shapes stay fixed and no host waits.
        self._storage = torch.full((columns, share + 1), fill, device=device, dtype=dtype)

    @property
    def values(self) -> Tensor:
        """This rank's share ``[columns, about n / W]``; sample i of it has the index ``i W + rank``."""
        return self._storage[:, :-1]

    def look_up(self, index: Tensor) -> Tensor:
        """The numbers of the samples ``index`` ``[B]``, which is the same on all ranks: ``[columns, B]``.

        Raises:
            ValueError: on every rank, naming the first index that is not a sample's. On CUDA, where nothing waits for
                the host, the failed assertion of the kernel ends the process instead and names none.
        """
        place, mine = self._place(index)
        try:
            found = self._storage[:, place]
        except IndexError:
            check_index(index, self.n)
            raise
        return self.ranks.sum(torch.where(mine, found, torch.zeros_like(found)))

    def write(self, index: Tensor, values: Tensor) -> None:
        """Put ``values`` ``[columns, B]`` at ``index``; the same on all ranks, equal where an index is repeated.

        Raises:
            ValueError: as in ``look_up``.
        """
        place = self._place(index)[0]
        try:
            self._storage[:, place] = values.detach().to(self._storage)
        except IndexError:
            check_index(index, self.n)
            raise

    def whole(self) -> Tensor:
        """The table ``[columns, n]`` on rank 0, for a checkpoint; empty on the others. All ranks must call it.

        It is on the CPU, whatever the device of the shares: that device need not hold the whole.
        """
        parts = self.ranks.collect(self.values.T.contiguous())
        whole = torch.empty(self.columns, self.n if parts else 0, dtype=self._storage.dtype)
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
        index = require_index(index)
        places = self._storage.shape[1]
        mine = index % self.ranks.size == self.ranks.rank
        place = torch.div(index, self.ranks.size, rounding_mode="floor")
        place = torch.where(mine, place, torch.full_like(place, places - 1))
        # Divided by W, wrapped from the end, or at the spare place, a wrong index would name some other number. It is
        # sent outside the storage of every rank, so that all of them fail and none waits for the others.
        return torch.where((index < 0) | (index >= self.n), torch.full_like(place, places), place), mine


def require_index(index: Tensor | None) -> Tensor:
    """The index as int64; checks that it is there and of an integer type, which needs no host read.

    Raises:
        ValueError: for None, or another type.
    """
    if index is None:
        raise ValueError("this method keeps numbers per sample, so every batch needs the stable index of its samples")
    if index.is_floating_point() or index.is_complex() or index.dtype == torch.bool:
        raise ValueError(f"a sample index is an integer, got {index.dtype}")
    return index.long()


def check_index(index: Tensor | None, n: int) -> None:
    """Refuse an index that does not name a sample; read on the host, so call it before training, not in a step.

    Raises:
        ValueError: naming the first wrong index, or saying that there is none.
    """
    index = require_index(index)
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
