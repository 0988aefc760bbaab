"""Pictures: right and wrong are marked as the groups say, in colour and in signs, and nothing global is touched."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import matplotlib
import pytest
import torch
from matplotlib.colors import to_hex
from torch import Tensor

from neuclip_lib.data.pairs import PairSet
from neuclip_lib.training.pictures import (
    RIGHT,
    WRONG,
    curves_figure,
    image_to_text_figure,
    query_places,
    text_to_image_figure,
)


def pairs(n: int = 40) -> PairSet:
    g = torch.Generator().manual_seed(0)
    return PairSet(
        name="fake",
        split="test",
        images=torch.randint(0, 256, (n, 3, 6, 6), generator=g, dtype=torch.uint8),
        captions=[f"caption ${i}" for i in range(n)],  # a dollar must not start a formula
        index=torch.arange(n),
        group=torch.arange(n) // 2,  # two right answers each
        keys=[str(i) for i in range(n)],
        content_hash="0",
    )


def embeddings(n: int = 40) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(1)
    e1 = torch.randn(n, 6, generator=g)
    e2 = e1 + torch.randn(n, 6, generator=g)
    return torch.nn.functional.normalize(e1, dim=1), torch.nn.functional.normalize(e2, dim=1)


def best_five(queries: Tensor, candidates: Tensor) -> dict[int, list[int]]:
    scores = queries.double() @ candidates.double().T
    return {q: sorted(range(len(candidates)), key=lambda j: -scores[q, j])[:5] for q in query_places(40).tolist()}


def test_images_nearest_to_a_caption_are_marked() -> None:
    data, (e1, e2) = pairs(), embeddings()
    figure = text_to_image_figure(data, e1, e2, "some run", "by somebody")
    axes = figure.axes
    assert len(axes) == 12 * 6
    kinds = set()
    for row, (query, top) in enumerate(best_five(e2, e1).items()):
        assert axes[6 * row].texts[0].get_text() == data.captions[query]
        for axis, match in zip(axes[6 * row + 1 : 6 * row + 6], top, strict=True):
            right = query // 2 == match // 2
            kinds.add(right)
            assert axis.images[0].get_array().tolist() == data.images[match].permute(1, 2, 0).tolist()
            assert axis.get_xlabel() == ("\u2713" if right else "\u2717")
            frame = axis.spines["left"]
            assert to_hex(frame.get_edgecolor()).upper() == (RIGHT if right else WRONG)
            assert frame.get_linestyle() == ("-" if right else "--")
    assert kinds == {True, False}
    assert "some run" in figure.get_suptitle() and figure.get_supxlabel() == "by somebody"


def test_captions_nearest_to_an_image_are_marked() -> None:
    data, (e1, e2) = pairs(), embeddings()
    axes = image_to_text_figure(data, e1, e2).axes
    assert len(axes) == 6 * 4
    for place, (query, top) in enumerate(best_five(e1, e2).items()):
        at = 4 * (place % 6) + 2 * (place // 6)
        assert axes[at].images[0].get_array().tolist() == data.images[query].permute(1, 2, 0).tolist()
        shown = [text.get_text() for text in axes[at + 1].texts]
        want = [("\u2713" if query // 2 == j // 2 else "\u2717", data.captions[j]) for j in top]
        assert shown == [part for line in want for part in line]
        weights = [text.get_fontweight() for text in axes[at + 1].texts[1::2]]
        assert weights == ["bold" if sign == "\u2713" else "normal" for sign, _ in want]


@pytest.mark.parametrize("n", [1, 3, 7])
def test_fewer_pairs_than_places_are_fine(n: int, tmp_path: Any) -> None:
    data, (e1, e2) = pairs(n), embeddings(n)
    for draw in (text_to_image_figure, image_to_text_figure):
        figure = draw(data, e1, e2)
        assert sum(bool(axis.images) for axis in figure.axes) == (n * min(n, 5) if draw is text_to_image_figure else n)
        figure.savefig(tmp_path / "picture.png")


def test_the_queries_are_the_same_for_every_run() -> None:
    assert query_places(1040).tolist() == query_places(1040).tolist()
    assert len(set(query_places(1040).tolist())) == 12
    assert query_places(5).tolist() == [0, 1, 2, 3, 4]


ROWS: list[dict[str, Any]] = [
    {"step": 0, "kind": "probe", "loss": 0.0},
    {"step": 5, "kind": "train", "loss": 2.0},
    {"step": 10, "kind": "train", "loss": None},
    {"step": 10, "kind": "probe", "loss": -1.0},
    {"step": 10, "kind": "normalizer_error", "estimators": {"neuclip": {"mse": 0.5}, "batch": {"mse": 0.9}}},
    {"step": 20, "kind": "normalizer_error", "estimators": {"neuclip": {"mse": 0.25}, "batch": {"mse": None}}},
]


def test_curves_show_what_was_measured(tmp_path: Any) -> None:
    figure = curves_figure(ROWS, "neuclip")
    loss, probe, error = figure.axes
    assert [line.get_xydata().tolist() for line in loss.get_lines()] == [[[5, 2]]]
    assert [line.get_xydata().tolist() for line in probe.get_lines()] == [[[0, 0], [10, -1]]]
    assert {line.get_label(): line.get_xydata().tolist() for line in error.get_lines()} == {
        "neuclip": [[10, 0.5], [20, 0.25]],
        "batch": [[10, 0.9]],
    }
    looks = [(line.get_color(), line.get_linestyle(), line.get_marker()) for line in error.get_lines()]
    assert all(a != b for a, b in zip(*looks, strict=True))  # told apart by colour, by line and by mark
    assert error.get_yscale() == "log"
    assert [text.get_text() for text in error.get_legend().get_texts()] == ["neuclip", "batch"]
    figure.savefig(tmp_path / "curves.png")
    nothing = curves_figure([], "neuclip")
    assert [axis.texts[0].get_text() for axis in nothing.axes] == ["not measured"] * 3
    nothing.savefig(tmp_path / "nothing.png")


def test_no_global_state_of_matplotlib_is_touched() -> None:
    before = dict(matplotlib.rcParams)
    data, (e1, e2) = pairs(), embeddings()
    text_to_image_figure(data, e1, e2)
    assert dict(matplotlib.rcParams) == before
    code = "import sys, neuclip_lib.training.pictures as p; p.curves_figure([], 'x'); print([m for m in sys.modules if "
    code += "m.startswith('matplotlib.pyplot')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "[]"
