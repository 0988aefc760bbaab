"""NeuCLIP and the family of contrastive losses around it."""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

# Two spinning OpenMP threads on one busy core are a hundred times slower than one; the variable is
# read when torch loads its OpenMP library, so it stands before anything imports torch.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

__version__ = "0.1.0"

if TYPE_CHECKING:
    from neuclip_lib import presets
    from neuclip_lib.methods import method_names
    from neuclip_lib.rho import suggest_rho
    from neuclip_lib.training import Run, TrainConfig, train
    from neuclip_lib.training.evaluate import evaluate
    from neuclip_lib.training.open_clip_loss import open_clip_loss
    from neuclip_lib.training.run import load

__all__ = [
    "Run",
    "TrainConfig",
    "__version__",
    "evaluate",
    "load",
    "method_names",
    "open_clip_loss",
    "presets",
    "suggest_rho",
    "train",
]

# Looked up on first use: importing the package takes no time, and a command says what is wrong before torch loads.
_PLACES = {
    "Run": "training.run",
    "TrainConfig": "training.config",
    "evaluate": "training.evaluate",
    "load": "training.run",
    "method_names": "methods",
    "open_clip_loss": "training.open_clip_loss",
    "suggest_rho": "rho",
    "train": "training.trainer",
}


def __getattr__(name: str) -> Any:
    if name == "presets":
        return importlib.import_module("neuclip_lib.presets")
    if name not in _PLACES:
        raise AttributeError(f"module 'neuclip_lib' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(importlib.import_module(f"neuclip_lib.{_PLACES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
