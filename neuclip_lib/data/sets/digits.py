"""Handwritten digits and their names: the first zero-shot task."""

from __future__ import annotations

import numpy as np
import torch

from neuclip_lib.data.pairs import PairSet
from neuclip_lib.data.spec import PLACEHOLDER, RawSet, SetSpec, ZeroShotTask

SIZE = 32
INK = 16  # the darkest value in the source
NAMES = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
TEMPLATES = ["the digit {}", "a handwritten {}", "the number {}"]


def produce() -> RawSet:
    """Scale the 8 x 8 scans up by 4, ink dark on white; sample i is described by template i modulo 3."""
    from sklearn.datasets import load_digits

    bunch = load_digits()
    scale = SIZE // bunch.images.shape[-1]
    grey = np.rint(255 * (1 - bunch.images / INK)).astype(np.uint8).repeat(scale, axis=1).repeat(scale, axis=2)
    names = [NAMES[label] for label in bunch.target]
    places = [str(i) for i in range(len(names))]
    return RawSet(
        images=grey[:, None].repeat(3, axis=1),
        captions=[TEMPLATES[i % len(TEMPLATES)].replace(PLACEHOLDER, name) for i, name in enumerate(names)],
        group=names,
        split_key=places,
        key=places,
        fields={"digit": names},
    )


def zero_shot(pairs: PairSet) -> list[ZeroShotTask]:
    """Which of the ten digits is it?"""
    labels = torch.tensor([NAMES.index(name) for name in pairs.fields["digit"]], dtype=torch.int64)
    return [ZeroShotTask("digits", pairs.images, labels, list(NAMES), list(TEMPLATES))]


SPEC = SetSpec(
    name="digits",
    title="handwritten digits with their names",
    origin="the test part of Optical Recognition of Handwritten Digits (E. Alpaydin, C. Kaynak, UCI Machine Learning "
    "Repository), as it ships in scikit-learn; captions are ours",
    licence="BSD-3-Clause with scikit-learn; CC BY 4.0 at UCI",
    attribution="Digits: E. Alpaydin and C. Kaynak, Optical Recognition of Handwritten Digits, UCI, CC BY 4.0",
    task="first zero-shot task, ten classes",
    image_size=SIZE,
    packages=("scikit-learn",),
    produce=produce,
    zero_shot=zero_shot,
    counts={"train": 1272, "validation": 279, "test": 246},
    note="The scans are 8 x 8 pixels, each drawn as a square of 4 by 4. The split is by sample, so the same people "
    "wrote train and test. There are only ten concepts: in a batch of 128 about 13 of the negatives are false ones.",
)
