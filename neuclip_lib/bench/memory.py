"""Exact memory of a function of tensors: bytes of all storages alive at one time."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class PeakBytes(TorchDispatchMode):
    """``with PeakBytes() as seen: ...``, then ``seen.peak``: the most bytes that tensors made inside held at one time.

    Memory that an operator takes and gives back within itself is not seen.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._living: dict[int, list[int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = {x.untyped_storage().data_ptr() for x in args if isinstance(x, Tensor)}
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(x, Tensor):
                self._see(x, known)
        return out

    def _see(self, x: Tensor, known: set[int]) -> None:
        storage = x.untyped_storage()
        key = storage.data_ptr()  # views share it
        if key not in self._living:
            if key in known:  # made before
                return
            self._living[key] = [0, storage.nbytes()]
            self.now += storage.nbytes()
            self.peak = max(self.peak, self.now)
        self._living[key][0] += 1
        weakref.finalize(x, self._drop, key)

    def _drop(self, key: int) -> None:
        entry = self._living[key]
        entry[0] -= 1
        if entry[0] == 0:
            self.now -= self._living.pop(key)[1]


def peak_bytes(call: Callable[[], object]) -> int:
    """The most bytes that ``call`` held at one time beyond what was there before."""
    with PeakBytes() as seen:
        call()
    return seen.peak
