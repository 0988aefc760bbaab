"""Where alpha, the log-normalizer of each anchor, comes from: the one thing in which the methods differ."""

from neuclip_lib.normalizers.amortized import AmortizedNormalizer, AmortizedOptions
from neuclip_lib.normalizers.base import Normalizer
from neuclip_lib.normalizers.batch import BatchNormalizer
from neuclip_lib.normalizers.moving_average import MovingAverageNormalizer, MovingAverageOptions
from neuclip_lib.normalizers.prototypes import PrototypeNormalizer, PrototypeOptions
from neuclip_lib.normalizers.stabilisers import Stabilised, cap_weight, share_with_batch

__all__ = [
    "AmortizedNormalizer",
    "AmortizedOptions",
    "BatchNormalizer",
    "MovingAverageNormalizer",
    "MovingAverageOptions",
    "Normalizer",
    "PrototypeNormalizer",
    "PrototypeOptions",
    "Stabilised",
    "cap_weight",
    "share_with_batch",
]
