"""Models on disk: ``model.json`` says what to build, ``model.safetensors`` holds the weights; open_clip's folders."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from neuclip_lib.files import atomic_folder, atomic_path, read_json, write_json
from neuclip_lib.models.base import ImageTextModel
from neuclip_lib.models.build import rebuild
from neuclip_lib.models.clip import PREPROCESS, OpenClipModel

DESCRIPTION, WEIGHTS = "model.json", "model.safetensors"
FORMAT = 1


def unwrap(model: nn.Module) -> ImageTextModel:
    """The model inside any order of ``torch.compile`` and DistributedDataParallel.

    Raises:
        TypeError: when there is none.
    """
    inner: Any = model
    while not isinstance(inner, ImageTextModel):
        parts = inner._modules if isinstance(inner, nn.Module) else {}
        if (inner := parts.get("_orig_mod", parts.get("module"))) is None:
            raise TypeError(f"expected a model of this library, bare or wrapped, got {type(model).__name__}")
    return inner


def save_model(model: nn.Module, folder: Path | str) -> Path:
    """Write ``model.json`` and ``model.safetensors`` into ``folder``; a compiled or DDP-wrapped model is unwrapped.

    Raises:
        TypeError: for another kind of model.
    """
    inner, folder = unwrap(model), Path(folder)
    state = {key: value.detach().cpu().contiguous() for key, value in clean_keys(inner.state_dict()).items()}
    with atomic_path(folder / WEIGHTS) as temporary:
        save_file(state, temporary)
    write_json(folder / DESCRIPTION, {"format": FORMAT, "model": inner.description()})
    return folder


def load_model(folder: Path | str) -> ImageTextModel:
    """The model that ``save_model`` wrote, on the CPU, in train mode as a new one is.

    Raises:
        RuntimeError: naming the file that is missing or damaged, or the weights that do not fit the description.
    """
    folder = Path(folder)
    stored = read_json(folder / DESCRIPTION)
    if not isinstance(stored, dict) or stored.get("format") != FORMAT:
        raise RuntimeError(f"{folder / DESCRIPTION} is not a description of a model in format {FORMAT}")
    try:
        model = rebuild(stored.get("model", {}))
    except ValueError as error:
        raise RuntimeError(f"{folder / DESCRIPTION} does not describe a model: {error}") from error
    file = folder / WEIGHTS
    if not file.is_file():
        raise RuntimeError(f"{file} is missing")
    try:
        state = load_file(file)
    except (SafetensorError, OSError, ValueError) as error:
        raise RuntimeError(f"{file} is damaged ({error})") from error
    load_weights(model, state, str(file))
    return model


def load_weights(model: nn.Module, state: dict[str, Tensor], source: str) -> None:
    """Put ``state`` into ``model``; keys must agree but for what compile and DDP put before them, on either side.

    Args:
        model: bare or wrapped.
        source: named in errors.

    Raises:
        RuntimeError: naming the keys that are missing, too many, or of another shape or type.
    """
    inner, given = unwrap(model), clean_keys(state)
    wanted = inner.state_dict()
    problems = [f"missing: {key}" for key in wanted if key not in given]
    problems += [f"unknown: {key}" for key in given if key not in wanted]
    for key in (key for key in wanted if key in given):
        have, need = ((*tensor.shape, tensor.dtype) for tensor in (given[key], wanted[key]))
        if have != need:
            problems.append(f"{key} is {_kind(given[key])} instead of {_kind(wanted[key])}")
    if problems:
        more = f"; and {len(problems) - 8} more" if len(problems) > 8 else ""
        raise RuntimeError(f"the weights in {source} do not fit the model: {'; '.join(problems[:8])}{more}")
    inner.load_state_dict(given)


def clean_keys(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Keys without "module." (DistributedDataParallel, in front) and "_orig_mod." (torch.compile, anywhere).

    Raises:
        RuntimeError: when two keys become one.
    """
    cleaned: dict[str, Tensor] = {}
    for key, value in state.items():
        parts = [part for part in key.split(".") if part != "_orig_mod"]
        while parts[0] == "module":
            del parts[0]
        if (clean := ".".join(parts)) in cleaned:
            raise RuntimeError(f"the key {clean!r} stands twice in the weights, once as {key!r}")
        cleaned[clean] = value
    return cleaned


def export_open_clip(model: nn.Module, folder: Path | str, tau: float | None = None) -> Path:
    """A folder that ``open_clip.create_model_and_transforms("local-dir:FOLDER")`` loads, with equal embeddings.

    A compact vocabulary becomes open_clip's whole one; the tokens that shared a vector get a copy of it each.

    Args:
        folder: replaced as a whole when it exists.
        tau: temperature to store as open_clip's ``logit_scale = log(1 / tau)``; without it the stored value stays.

    Raises:
        ValueError: for ``small``, which is not a model of open_clip, and for tau not above 0.
    """
    inner = unwrap(model)
    if not isinstance(inner, OpenClipModel):
        raise ValueError(
            f"model {inner.name!r} is not built from open_clip's classes and cannot be exported to it; train nano, "
            "micro, mini or an open_clip name, or load this one with neuclip_lib's load_model"
        )
    state = {key: value.detach().cpu().contiguous() for key, value in clean_keys(inner.clip.state_dict()).items()}
    config = {key: dict(value) if isinstance(value, dict) else value for key, value in inner.config.items()}
    if inner.compact is not None:
        key = "token_embedding.weight"
        state[key] = state[key][inner.compact.table.cpu()]  # [entries, width] to [49408, width]
        config["text_cfg"]["vocab_size"] = len(state[key])
    if tau is not None:
        if not tau > 0:
            raise ValueError(f"tau must be above 0, got {tau}")
        state["logit_scale"] = torch.full_like(state["logit_scale"], math.log(1.0 / tau))
    with atomic_folder(folder) as temporary:
        save_file(state, temporary / "open_clip_model.safetensors")
        preprocess = {**inner.preprocess, **{key: list(inner.preprocess[key]) for key in PREPROCESS}}
        write_json(temporary / "open_clip_config.json", {"model_cfg": config, "preprocess_cfg": preprocess})
        if hasattr(inner.tokenizer, "save_pretrained"):  # names with a Hugging Face tokenizer read it from the folder
            inner.tokenizer.save_pretrained(temporary)
    return Path(folder)


def _kind(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
