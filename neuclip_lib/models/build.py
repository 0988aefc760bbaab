"""Models by name."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from neuclip_lib.models.base import ImageTextModel
from neuclip_lib.models.clip import TINY, build_open_clip, build_tiny, resolve_open_clip, tiny_from_ids
from neuclip_lib.models.small import SmallModel
from neuclip_lib.models.words import WordTokenizer

OWN = ("small", *TINY)


def model_names() -> list[str]:
    """``small``, ``nano``, ``micro``, ``mini``, then every name open_clip can build (``open_clip.list_models()``)."""
    import open_clip

    return [*OWN, *open_clip.list_models()]


def check_model_name(name: str) -> None:
    """Raise ValueError, with our names and the closest ones of open_clip, when no model has that name."""
    if name not in OWN:
        resolve_open_clip(name)


def build_model(
    name: str,
    vocabulary_texts: Iterable[str],
    image_size: int | None,
    seed: int,
    pretrained: Path | str | None = None,
) -> ImageTextModel:
    """A model with random weights that depend on the arguments alone; the global random state is left as it is.

    Args:
        name: one of ``model_names()``.
        vocabulary_texts: read once; their words (``small``) or tokens (tiny models) make the vocabulary. Tiny models
            without any text keep open_clip's whole vocabulary; open_clip's own names always do.
        image_size: side of the images in pixels; None is 32 for our models and an open_clip name's own size.
        seed: of the initial weights.
        pretrained: a local file of weights, for open_clip's names only.

    Raises:
        ValueError: for an unknown name, a size that does not fit, ``small`` without a word, or weights for our models.
        RuntimeError: when the weights cannot be read, or an open_clip model cannot be built offline.
    """
    if name in OWN and pretrained is not None:
        raise ValueError(f"there are no pretrained weights for model {name!r}; load a saved one with load_model")
    with torch.random.fork_rng(devices=[]):
        # Not torch.manual_seed, which would seed the GPUs too.
        torch.default_generator.manual_seed(seed)
        if name == "small":
            return SmallModel(WordTokenizer.from_texts(vocabulary_texts), image_size or 32)
        if name in TINY:
            return build_tiny(name, vocabulary_texts, image_size or 32)
        return build_open_clip(resolve_open_clip(name), image_size, pretrained)


def rebuild(description: dict[str, Any]) -> ImageTextModel:
    """The model of a ``description()``, with the initial weights of seed 0.

    Raises:
        ValueError: naming the entry that is missing, unknown or of another type.
    """
    name = _entry(description, "name", str)
    size, dim = _entry(description, "image_size", int), _entry(description, "dim", int)
    check_model_name(name)
    known = {"name", "image_size", "dim", "vocabulary"} | ({"context_length"} if name == "small" else set())
    if unknown := description.keys() - known:
        raise ValueError(f"the description of a {name!r} model has unknown entries: {', '.join(sorted(unknown))}")
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        model = _from_parts(name, size, description)
    if model.dim != dim:
        raise ValueError(f"model {name!r} has {model.dim} dimensions here, its description says {dim}")
    return model


def _from_parts(name: str, size: int, description: dict[str, Any]) -> ImageTextModel:
    if name == "small":
        words = _list(description, "vocabulary", str)
        return SmallModel(WordTokenizer(words, _entry(description, "context_length", int)), size)
    if description.get("vocabulary", False) is None:
        return tiny_from_ids(name, None, size) if name in TINY else build_open_clip(name, size)
    if name in TINY:
        return tiny_from_ids(name, _list(description, "vocabulary", int), size)
    raise ValueError(f"the entry 'vocabulary' of model {name!r} must be null")


def _entry(description: Any, key: str, kind: type) -> Any:
    value = description.get(key) if isinstance(description, dict) else None
    if not isinstance(value, kind) or isinstance(value, bool):
        raise ValueError(f"the entry {key!r} must be of type {kind.__name__}, got {value!r:.60}")
    return value


def _list(description: dict[str, Any], key: str, kind: type) -> list[Any]:
    values = _entry(description, key, list)
    if wrong := [value for value in values if not isinstance(value, kind) or isinstance(value, bool)]:
        raise ValueError(f"the entry {key!r} must be a list of {kind.__name__}, it holds {wrong[0]!r:.60}")
    return values
