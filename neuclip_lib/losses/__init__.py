"""The losses: functions of embeddings, a log-normalizer and a temperature."""

from neuclip_lib.losses.dhel import dhel_loss
from neuclip_lib.losses.global_contrastive import Objective, TauRule, global_contrastive_loss, info_nce
from neuclip_lib.losses.kcl import KclOptions, kcl_loss
from neuclip_lib.losses.siglip import SiglipOptions, siglip_loss

__all__ = [
    "KclOptions",
    "Objective",
    "SiglipOptions",
    "TauRule",
    "dhel_loss",
    "global_contrastive_loss",
    "info_nce",
    "kcl_loss",
    "siglip_loss",
]
