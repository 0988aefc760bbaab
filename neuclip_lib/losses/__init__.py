"""The losses: functions of embeddings, a log-normalizer and a temperature."""

from neuclip_lib.losses.global_contrastive import Objective, global_contrastive_loss, info_nce

__all__ = ["Objective", "global_contrastive_loss", "info_nce"]
