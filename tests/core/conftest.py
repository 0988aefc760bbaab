"""Watches what a function of tensors does: its operators, and the memory it takes."""

import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

WAITS = {"_local_scalar_dense", "is_nonzero", "nonzero", "equal", "masked_select", "_unique2", "_to_copy", "lift_fresh"}
"""Operators after which, on a GPU, the host waits for the device or the device for the host."""


class Recorder(TorchDispatchMode):
    """Operators that made the host wait; elements of the largest tensor given, and of all that lived at one time."""

    def __init__(self):
        super().__init__()
        self.waits, self.largest, self.peak = set(), 0, 0
        self.now, self.living = 0, {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        self.waits |= {name} & WAITS
        if name in ("index", "index_put", "index_put_") and any(
            x is not None and x.dtype == torch.bool for x in args[1]
        ):
            self.waits.add("index by mask")  # it counts the mask's ones first
        for x in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(x, torch.Tensor):
                self._see(x)
        return out

    def _see(self, x):
        self.largest = max(self.largest, x.numel())
        storage = x.untyped_storage()
        key = storage.data_ptr()  # views share it
        if key not in self.living:
            self.living[key] = [0, storage.nbytes() // x.element_size()]
            self.now += self.living[key][1]
            self.peak = max(self.peak, self.now)
        self.living[key][0] += 1
        weakref.finalize(x, self._drop, key)

    def _drop(self, key):
        self.living[key][0] -= 1
        if self.living[key][0] == 0:
            self.now -= self.living.pop(key)[1]


@pytest.fixture
def recorder():
    """``with recorder() as seen: ...``"""
    return Recorder
