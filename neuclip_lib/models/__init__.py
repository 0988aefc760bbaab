"""Models that turn images and texts into unit vectors: by name, saved and loaded, exported to open_clip."""

from neuclip_lib.models.base import ImageTextModel, unit_rows
from neuclip_lib.models.build import build_model, check_model_name, model_names, rebuild
from neuclip_lib.models.storage import export_open_clip, load_model, load_weights, save_model, unwrap

__all__ = [
    "ImageTextModel",
    "build_model",
    "check_model_name",
    "export_open_clip",
    "load_model",
    "load_weights",
    "model_names",
    "rebuild",
    "save_model",
    "unit_rows",
    "unwrap",
]
