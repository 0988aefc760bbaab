"""Training: options, the step, checkpoints, the record of a run."""

from neuclip_lib.training.config import TrainConfig
from neuclip_lib.training.optim import OptimOptions
from neuclip_lib.training.run import Run
from neuclip_lib.training.trainer import train

__all__ = ["OptimOptions", "Run", "TrainConfig", "train"]
