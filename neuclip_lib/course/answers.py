"""Comparing a reader's result with the expected one, and saying both in a few numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

NUMBERS_SHOWN = 6


def same(expected: Any, got: Any, tolerance: float) -> bool:
    """Equal kind, shape and, within ``tolerance`` (relative above 1, absolute below), values; NaN equals NaN."""
    if problem(expected, got):
        return False
    if isinstance(expected, dict):
        return all(same(expected[key], got[key], tolerance) for key in expected)
    if isinstance(expected, (list, tuple)):
        return all(same(one, other, tolerance) for one, other in zip(expected, got, strict=True))
    if _is_numeric(expected):
        left, right = _array(expected), _array(got)
        near = left.isfinite() & ((left - right).abs() <= tolerance * left.abs().clamp(min=1))
        return bool((near | (left == right) | (left.isnan() & right.isnan())).all())
    return bool(expected == got)


def problem(expected: Any, got: Any) -> str:
    """Why the two cannot be compared at all: another kind or shape; empty when they can."""
    if isinstance(expected, dict):
        fits = isinstance(got, dict) and set(got) == set(expected)
        found = [problem(expected[key], got[key]) for key in expected] if fits else []
        return next(filter(None, found), "") if fits else f"expected {kind_of(expected)}, got {kind_of(got)}"
    if isinstance(expected, (list, tuple)):
        if not isinstance(got, (list, tuple)) or len(got) != len(expected):
            return f"expected {kind_of(expected)}, got {kind_of(got)}"
        found = [problem(one, other) for one, other in zip(expected, got, strict=True)]
        return next((f"entry {place}: {text}" for place, text in enumerate(found) if text), "")
    if isinstance(expected, (Tensor, np.ndarray)):
        fits = type(got) is type(expected) and got.shape == expected.shape
        return "" if fits else f"expected {kind_of(expected)}, got {kind_of(got)}"
    if _is_numeric(expected):
        fits = _is_numeric(got) and _array(got).ndim == 0
        return "" if fits else f"expected one number, got {kind_of(got)}"
    return "" if type(expected) is type(got) else f"expected {kind_of(expected)}, got {kind_of(got)}"


def is_finite(value: Any) -> bool:
    """No NaN or infinity anywhere in a result."""
    if isinstance(value, dict):
        return all(map(is_finite, value.values()))
    if isinstance(value, (list, tuple)):
        return all(map(is_finite, value))
    return not _is_numeric(value) or bool(_array(value).isfinite().all())


def kind_of(value: Any) -> str:
    """What a value is, in words."""
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, np.ndarray):
        return f"a numpy array of shape {value.shape}"
    if isinstance(value, dict):
        return f"a dict with keys {list(value)}"
    if isinstance(value, (list, tuple)):
        return f"a {type(value).__name__} of {len(value)}"
    if value is None or isinstance(value, bool):
        return str(value)
    return f"a {type(value).__name__}"


def shown(value: Any) -> str:
    """A value in a few numbers of four digits."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {shown(one)}" for key, one in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "(" + ", ".join(map(shown, value)) + ")"
    if not _is_numeric(value):
        return repr(value)[:200]
    array = _array(value)
    if array.ndim == 0:
        return f"{array.item():.4g}"
    if array.ndim == 2 and array.numel() <= NUMBERS_SHOWN**2:
        return "[" + ", ".join(shown(row) for row in array) + "]"
    flat = array.flatten()
    numbers = ", ".join(f"{number:.4g}" for number in flat[:NUMBERS_SHOWN].tolist())
    return f"[{numbers}]" if flat.numel() <= NUMBERS_SHOWN else f"[{numbers}, ...] of shape {tuple(array.shape)}"


def _is_numeric(value: Any) -> bool:
    if isinstance(value, np.ndarray):
        return value.dtype.kind in "biuf"
    return isinstance(value, (Tensor, int, float, np.number)) and not isinstance(value, bool)


def _array(value: Any) -> Tensor:
    return torch.as_tensor(value).detach().to("cpu", torch.float64)
